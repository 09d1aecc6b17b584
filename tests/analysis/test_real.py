"""DeiT-Ti with its real weights on real photographs: what the paper shows must show here."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.analysis.made import DEIT, SAMPLES, with_real_files
from vitrail.analysis import extract_filters, extract_positions, measure_distances, record_attention, trace_image

pytestmark = with_real_files


@pytest.fixture(scope="module")
def model():
    return vitrail.load(DEIT)


@pytest.fixture(scope="module")
def photographs(model):
    paths = sorted(SAMPLES.glob("*.JPEG"))[::40][:4]
    assert paths
    return torch.stack([model.preprocessing(Image.open(path).convert("RGB")) for path in paths])


@torch.no_grad()
def test_logits_with_recording_are_the_same_to_the_bit(model, photographs):
    plain = model(photographs)
    with record_attention(model) as maps:
        assert torch.equal(model(photographs), plain)
    assert maps[12].shape == (len(photographs), 3, 197, 197)


def test_mean_attention_distance_grows_with_depth(model, photographs):
    """Figure 7, right: low layers have heads that look nearby, high ones look far."""
    found = measure_distances(model, [photographs])
    assert found.mean.shape == (12, 3)
    low, high = found.mean[:3].mean(), found.mean[-3:].mean()
    assert high > 1.2 * low
    assert found.mean[:3].min() < 32 < found.mean[-3:].min()  # two patches


def test_relevance_explains_the_class_that_was_asked_for(model, photographs):
    first = trace_image(model, photographs[:1], views=["relevance"])
    other = trace_image(model, photographs[:1], views=["relevance"], target=(first.target + 500) % 1000)
    assert np.corrcoef(first.relevance.ravel(), other.relevance.ravel())[0, 1] < 0.99


def test_position_and_filters_look_as_published(model):
    """Figure 7, left and centre: a position is most like itself and its neighbours; filters are regular patterns."""
    similarity = extract_positions(model).similarity
    for row, column in ((3, 3), (7, 10), (12, 1)):
        here = similarity[row, column]
        assert np.unravel_index(here.argmax(), here.shape) == (row, column)
        near = np.mean([here[row - 1, column], here[row + 1, column], here[row, column - 1], here[row, column + 1]])
        assert near > here.mean() + 0.1
    found = extract_filters(model)
    assert found.tiles.shape == (28, 16, 16, 3)
    for tile in found.tiles[:5]:  # what neighbouring pixels have to do with each other: nothing in noise, much in waves
        assert abs(np.corrcoef(tile[:, :-1].ravel(), tile[:, 1:].ravel())[0, 1]) > 0.5
        assert abs(np.corrcoef(tile[:-1].ravel(), tile[1:].ravel())[0, 1]) > 0.5
