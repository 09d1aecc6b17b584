"""Token maps: colours, similarity, norm, spectrum."""

import math

import torch

from vitrail.analysis.tokens import (
    grid_frequencies,
    principal_components,
    token_colours,
    token_norms,
    token_similarity,
    token_spectrum,
)


def test_colours_follow_the_largest_components_in_their_order():
    strengths = torch.linspace(-1, 1, 40)
    other = torch.cos(torch.linspace(0, 2 * math.pi, 41)[:40])
    directions = torch.linalg.qr(torch.randn(16, 16)).Q
    tokens = 100 * strengths[:, None] * directions[0] + other[:, None] * directions[1] + 7
    found = token_colours(tokens)
    assert abs(torch.corrcoef(torch.stack((found[:, 0], strengths)))[0, 1]) > 0.99
    assert abs(torch.corrcoef(torch.stack((found[:, 1], other)))[0, 1]) > 0.99
    assert (found[:, 2] == 0.5).all()  # nothing is left to show


def test_colours_do_not_depend_on_the_sign_of_a_component_or_the_number_of_rows():
    tokens = torch.randn(12, 30)
    twice = torch.cat((tokens, tokens, tokens))  # more rows than columns: the other way to the same components
    torch.testing.assert_close(
        principal_components(tokens, 3)[0], principal_components(twice, 3)[0], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        principal_components(tokens, 3)[1], principal_components(twice, 3)[1], rtol=1e-4, atol=1e-5
    )
    directions, share = principal_components(tokens, 99)
    assert len(directions) == 12
    assert (directions.gather(1, directions.abs().argmax(1, keepdim=True)) > 0).all()
    torch.testing.assert_close(share.sum(), torch.tensor(1.0))


def test_one_enormous_token_does_not_leave_the_others_grey():
    tokens = torch.randn(400, 8)
    tokens[7] = 1e4
    assert token_colours(tokens).std(0).max() > 0.2


def test_constant_tokens_are_grey():
    assert (token_colours(torch.ones(9, 5)) == 0.5).all()


def test_similarity_and_norm():
    tokens = torch.tensor([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [-3.0, -4.0]])
    torch.testing.assert_close(token_similarity(tokens, 0), torch.tensor([1.0, 1.0, 0.0, -1.0]))
    torch.testing.assert_close(token_norms(tokens), torch.tensor([5.0, 10.0, 5.0, 5.0]))


def test_spectrum_of_a_square_grid_is_that_of_the_authors_code():
    tokens = torch.randn(14 * 14, 24)
    # https://github.com/xxxnell/how-do-vits-work: transform, log, shift, mean over channels, half of the diagonal, less its start
    maps = tokens.T.unflatten(1, (14, 14))
    log = (torch.fft.fft2(maps).abs() + 1e-6).log()
    diagonal = log.roll((7, 7), (1, 2)).mean(0).diag()[7:]
    torch.testing.assert_close(token_spectrum(tokens, (14, 14))[:7], diagonal - diagonal[0])
    torch.testing.assert_close(grid_frequencies((14, 14)), torch.arange(8) / 7)


def test_a_wave_stands_out_at_its_frequency_on_any_grid():
    for h, w in ((16, 16), (8, 16), (16, 8)):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        wave = torch.cos(math.pi / 2 * (x + y)) + 0.1
        found = token_spectrum(wave.flatten()[:, None], (h, w))
        assert grid_frequencies((h, w))[found.argmax()] == 0.5
        assert len(found) == min(h, w) // 2 + 1


def test_a_frequency_that_the_longer_side_lacks_lies_between_its_neighbours():
    tokens = torch.randn(24, 3)
    log = (torch.fft.fft2(tokens.T.unflatten(1, (4, 6))).abs() + 1e-6).log().mean(0)
    half, whole = (log[1, 1] + log[1, 2]) / 2, log[2, 3]  # 0.5 is column 1.5 of 6, 1 is column 3
    torch.testing.assert_close(token_spectrum(tokens, (4, 6)), torch.stack((log[0, 0], half, whole)) - log[0, 0])


def test_a_grid_without_frequencies_has_one_value():
    assert token_spectrum(torch.randn(5, 3), (1, 5)).tolist() == [0.0]
