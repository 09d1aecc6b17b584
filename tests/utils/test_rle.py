"""COCO's run-length encoding: cases by hand, the reference's loops, and damaged strings."""

import numpy as np
import pytest

from vitrail.utils.rle import count_runs, decode_counts, decode_rle, encode_rle, fill_runs


def encode_by_loop(counts: list[int]) -> str:
    """The loop of COCO's own `rleToString`, one character after the other."""
    text = ""
    for i, count in enumerate(counts):
        rest, more = count - (counts[i - 2] if i > 2 else 0), True
        while more:
            code, rest = rest & 31, rest >> 5
            more = rest != (-1 if code & 16 else 0)
            text += chr((code | 32 if more else code) + 48)
    return text


def test_masks_are_read_column_by_column() -> None:
    mask = np.array([[0, 1, 1], [0, 0, 1]], bool)
    assert count_runs(mask).tolist() == [2, 1, 1, 2]
    np.testing.assert_array_equal(fill_runs([2, 1, 1, 2], 2, 3), mask)


def test_strings_are_those_made_by_hand() -> None:
    # 2, 1, 1, then 2 - 1 = 1: one character each.
    assert encode_rle(np.array([[0, 1, 1], [0, 0, 1]], bool)) == "2111"
    # An empty mask of 20×20: 400 = 12·32 + 16, so 10000 with more to come, and 01100.
    assert encode_rle(np.zeros((20, 20), bool)) == chr(48 + 32 + 16) + chr(48 + 12)
    # A full one begins with no pixel outside.
    assert encode_rle(np.ones((2, 2), bool)) == "04"
    # 16 needs a second group, because the 5th bit is the sign: 10000 with more to come, then 0.
    assert encode_rle(np.zeros((4, 4), bool)) == chr(48 + 32 + 16) + "0"


def test_differences_below_zero_keep_their_sign() -> None:
    mask = fill_runs([0, 9, 1, 1, 1], 12, 1)
    assert decode_counts(encode_rle(mask)).tolist() == [0, 9, 1, 1, 1]
    assert encode_rle(mask) == "091" + chr(48 + 24) + "0"  # 1 - 9 = -8 is 11000 in five bits


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (7, 1), (33, 20), (640, 427)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_encoding_equals_cocos_loop_and_is_inverted(height: int, width: int, share: float) -> None:
    mask = np.random.default_rng(height + width).random((height, width)) < share
    mask[: height // 2, : width // 3] = share > 0  # a long run beside short ones
    text = encode_rle(mask)
    assert text == encode_by_loop(count_runs(mask).tolist())
    np.testing.assert_array_equal(decode_rle(text, height, width), mask)
    np.testing.assert_array_equal(decode_rle(text.encode(), height, width), mask)


def test_encoding_equals_that_of_pycocotools() -> None:
    reference = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    mask = np.random.default_rng(0).random((50, 70)) < 0.3
    assert encode_rle(mask) == reference.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2111", "the runs have 6 pixels, but the mask has 2×2 = 4"),
        ("", "the runs have 0 pixels"),
        ("2 11", "characters from '0' to 'o' only"),
        ("2é11", "characters from '0' to 'o' only"),
        ("22P", "truncated"),
        ("O5", "runs must be 0 to 4 pixels long, got -1 to 5"),
        ("o" * 9 + "0", "has 10 groups"),
    ],
)
def test_damaged_strings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_rle(text, 2, 2)


@pytest.mark.parametrize("counts", [[1.5, 2.5], ["a"], [[4]], [2**62, 2**62, 2**62]])
def test_lists_that_are_no_counts_are_refused(counts: list) -> None:
    with pytest.raises(ValueError, match=r"runs must be|must be a list of integers"):
        fill_runs(counts, 2, 2)
