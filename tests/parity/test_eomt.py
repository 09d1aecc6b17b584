"""EoMT against transformers, with random weights: predictions of every layer, gradients, loss, and both outputs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints.convert import convert
from vitrail.models import eomt as models_eomt
from vitrail.models.eomt import EoMT, QueryLogits, combine_queries, find_segments, keep_queries, mask_attention
from vitrail.models.registry import build_segmenter
from vitrail.nn.position import Learned1D
from vitrail.objectives.mask_matching import (
    MaskMatching,
    MaskTargets,
    Points,
    match_queries,
    matching_loss,
    sample_points,
)

transformers = pytest.importorskip("transformers")
eomt = pytest.importorskip("transformers.models.eomt.modeling_eomt")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_blocks": 3,
    "num_queries": 6,
    "num_register_tokens": 2,
    "num_labels": 5,
    "mlp_ratio": 2,
    "train_num_points": 50,
}
LAYERS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "msa.out": "attention.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def build_pair():
    """Return our model and theirs with the same random weights, and the names of our parameters by theirs."""
    torch.manual_seed(0)
    theirs = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    ours = build_segmenter(
        decoder=EoMT(queries=6, blocks=3, upscales=2),
        classes=5,
        patch=8,
        width=32,
        depth=4,
        heads=4,
        mlp_width=64,
        image_size=32,
        registers=2,
        position=Learned1D(prefix="none"),
        layer_scale=1.0,
    )
    names = map_names()
    state = theirs.state_dict()
    mapped = {
        name: torch.cat([state[part].flatten(1) if "projection.w" in part else state[part] for part in parts])
        for name, parts in names.items()
    }
    own = ours.state_dict()
    assert set(mapped) == {name for name, _ in ours.named_parameters()}
    ours.load_state_dict({**own, **{name: tensor.view_as(own[name]) for name, tensor in mapped.items()}})
    return ours, theirs, names


def map_names():
    names = {
        "backbone.prefix.outputs": ["embeddings.cls_token"],
        "backbone.prefix.registers": ["embeddings.register_tokens"],
        "backbone.embed.projection.weight": ["embeddings.patch_embeddings.projection.weight"],
        "backbone.embed.projection.bias": ["embeddings.patch_embeddings.projection.bias"],
        "backbone.position.weight": ["embeddings.position_embeddings.weight"],
        "head.queries": ["query.weight"],
    }
    modules = {
        "backbone.pool.norm": "layernorm",
        "head.classifier": "class_predictor",
        **{f"head.mask_mlp.{2 * i}": f"mask_head.fc{i + 1}" for i in range(3)},
        **{f"head.upscale.{i}.expansion": f"upscale_block.block.{i}.conv1" for i in range(2)},
        **{f"head.upscale.{i}.norm": f"upscale_block.block.{i}.layernorm2d" for i in range(2)},
    }
    names |= {f"head.upscale.{i}.depthwise.weight": [f"upscale_block.block.{i}.conv2.weight"] for i in range(2)}
    for layer in range(4):
        own, other = f"backbone.blocks.{layer}", f"layers.{layer}"
        modules |= {f"{own}.{a}": f"{other}.{b}" for a, b in LAYERS.items()}
        names |= {f"{own}.branch{i}.scale.weight": [f"{other}.layer_scale{i}.lambda1"] for i in (1, 2)}
        for kind in ("weight", "bias"):
            names[f"{own}.msa.qkv.{kind}"] = [f"{other}.attention.{part}_proj.{kind}" for part in "qkv"]
    return names | {f"{a}.{kind}": [f"{b}.{kind}"] for a, b in modules.items() for kind in ("weight", "bias")}


def record_predictions(theirs):
    """Return a list to which every call of their `predict` adds its (mask logits, class logits)."""
    found, predict = [], theirs.predict

    def recorded(logits):
        found.append(predict(logits))
        return found[-1]

    theirs.predict = recorded
    return found


def draw_images(n=2):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("training", [True, False], ids=["masked", "inference"])
def test_predictions_of_every_layer_and_gradients(training):
    ours, theirs, names = build_pair()
    ours.train(training)
    theirs.train(training)
    if not training:
        theirs.attn_mask_probs.zero_()
    found = record_predictions(theirs)
    masked = torch.ones(2, 3, 6, dtype=torch.bool) if training else None
    actual = ours.predict_queries(draw_images(), masked)
    theirs(draw_images())
    assert len(actual) == len(found) == (4 if training else 1)
    weights = [torch.randn_like(tensor) for tensor in found[-1]]
    total = {"ours": 0.0, "theirs": 0.0}
    for prediction, expected in zip(actual, found, strict=True):
        torch.testing.assert_close(prediction.masks, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(prediction.classes, expected[1], rtol=1e-4, atol=1e-4)
        total["ours"] += sum((a * w).mean() for a, w in zip(prediction, weights, strict=True))
        total["theirs"] += sum((a * w).mean() for a, w in zip(expected, weights, strict=True))
    total["ours"].backward()
    total["theirs"].backward()
    for name, parts in names.items():
        gradient = ours.get_parameter(name).grad
        expected = torch.cat([theirs.get_parameter(part).grad.flatten() for part in parts])
        torch.testing.assert_close(gradient.flatten(), expected, rtol=1e-4, atol=1e-4)


def test_masked_queries_attend_to_patches_of_their_masks():
    masks, masked = torch.randn(2, 6, 16, 16), torch.ones(2, 6, dtype=torch.bool)
    masked[0, 2] = False
    bias = mask_attention(masks, masked, 3, (4, 4))
    assert bias.shape == (2, 1, 25, 25)
    hidden = bias[:, 0, -6:, 3:-6] < 0
    small = torch.nn.functional.interpolate(masks, size=(4, 4), mode="bilinear").flatten(2)
    assert torch.equal(hidden, (small <= 0) & masked[..., None])
    bias[:, 0, -6:, 3:-6] = 0
    assert not bias.any()  # all other tokens see each other


def draw_predictions(queries=12, classes=5):
    generator = torch.Generator().manual_seed(2)
    masks = torch.randn(2, queries, 4, 4, generator=generator)
    masks = torch.nn.functional.interpolate(masks, size=(16, 16), mode="bilinear") * 8
    return QueryLogits(masks, torch.randn(2, queries, classes + 1, generator=generator) * 4)


def to_theirs(predicted):
    return SimpleNamespace(
        masks_queries_logits=predicted.masks, class_queries_logits=predicted.classes, patch_offsets=None
    )


def test_semantic_scores_are_those_of_transformers():
    predicted, processor = draw_predictions(), transformers.EomtImageProcessor()
    size = {"shortest_edge": 32, "longest_edge": 32}
    found = processor.post_process_semantic_segmentation(
        to_theirs(predicted), [(32, 32)] * 2, size, return_segmentation_scores=True
    )
    logits = combine_queries(predicted, (32, 32))
    torch.testing.assert_close(
        logits.exp(), torch.stack([one.segmentation_scores for one in found]), rtol=1e-4, atol=1e-6
    )
    assert torch.equal(logits.argmax(1), torch.stack([one.segmentation for one in found]))


def test_scores_are_the_same_if_a_few_masks_are_resized_at_once(monkeypatch):
    predicted, resized = draw_predictions(), []
    whole = combine_queries(predicted, (40, 36))
    resize_map = models_eomt.resize_map

    def resize(masks, size):
        resized.append(masks.shape[1])
        return resize_map(masks, size)

    monkeypatch.setattr(models_eomt, "resize_map", resize)
    monkeypatch.setattr(models_eomt, "RESIZED_VALUES", 2 * 2 * 40 * 36)  # two masks of each of two images
    torch.testing.assert_close(combine_queries(predicted, (40, 36)), whole, rtol=1e-5, atol=1e-6)
    n = predicted.masks.shape[1]
    assert resized == [2] * (n // 2) + [1] * (n % 2)
    trained = predicted._replace(masks=predicted.masks.clone().requires_grad_())
    assert torch.equal(combine_queries(trained, (40, 36)), whole)


class SquashedProcessor(transformers.EomtImageProcessor):
    """Their processor for images that were squashed, not padded: nothing is cut off before masks get the size of the image."""

    def unpad_image(self, segmentation_logits, target_sizes, size):
        return [
            torch.nn.functional.interpolate(logits[None], size=target, mode="bilinear", align_corners=False)[0]
            for logits, target in zip(segmentation_logits, target_sizes, strict=True)
        ]


def check_segments(found, expected):
    """Compare a `SegmentMap` with a result of `post_process_panoptic_segmentation`."""
    infos = expected["segments_info"]
    assert [segment.label for segment in found.segments] == [info["label_id"] for info in infos]
    assert [segment.score for segment in found.segments] == pytest.approx([info["score"] for info in infos], abs=1e-5)
    assert torch.equal(found.ids.long() - 1, expected["segmentation"].long())


@pytest.mark.parametrize("size", [(32, 32), (20, 20), (75, 75), (60, 96), (7, 120)])
@pytest.mark.parametrize("stuff", [(), (0, 2, 3)], ids=["things", "stuff"])
@pytest.mark.parametrize("thresholds", [(0.8, 0.5, 0.4), (0.3, 0.5, 0.2), (0.1, 0.7, 0.0)])
def test_panoptic_segments_are_those_of_transformers(thresholds, stuff, size):
    predicted = draw_predictions(queries=20)
    square = size[0] == size[1]
    processor = transformers.EomtImageProcessor() if square else SquashedProcessor()
    edges = {"shortest_edge": 32, "longest_edge": 32}
    expected = processor.post_process_panoptic_segmentation(
        to_theirs(predicted), [size] * 2, *thresholds, list(stuff), edges
    )
    for image, other in enumerate(expected):
        queries = keep_queries(QueryLogits(*(part[image] for part in predicted)), thresholds[0])
        found = find_segments(queries, (32, 32), size, *thresholds[1:], stuff)
        assert found.segments
        check_segments(found, other)


def test_a_mask_that_keeps_exactly_the_overlap_threshold_is_kept_as_by_transformers():
    # Of five pixels of the second mask, the first query covers one: 4 / 5 is above 0.8 in float32.
    masks = torch.full((2, 1, 6), -9.0)
    masks[0, 0, :2], masks[1, 0, 1:] = 9.0, 5.0
    classes = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]])
    predicted = SimpleNamespace(
        masks_queries_logits=masks[None], class_queries_logits=classes[None], patch_offsets=None
    )
    size = {"shortest_edge": 1, "longest_edge": 6}
    (expected,) = SquashedProcessor().post_process_panoptic_segmentation(predicted, [(1, 6)], size=size)
    assert len(expected["segments_info"]) == 2
    check_segments(find_segments(keep_queries(QueryLogits(masks, classes)), (1, 6), (1, 6)), expected)


def test_an_image_without_objects_has_no_segments():
    predicted = draw_predictions()
    predicted.classes[..., -1] = 99.0
    queries = keep_queries(QueryLogits(*(part[0] for part in predicted)))
    ids, segments = find_segments(queries, (32, 32), (50, 40))
    assert not segments
    assert torch.equal(ids, torch.zeros(50, 40, dtype=torch.int32))


@pytest.mark.parametrize("side", [32, 50, 21])
def test_predict_gives_the_segments_of_transformers(side, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SIZES)).eval()
    with torch.no_grad():
        theirs.attn_mask_probs.zero_()
        theirs.class_predictor.weight.normal_(std=2.0)
        theirs.query.weight.normal_(std=3.0)
    theirs.save_pretrained(tmp_path)
    model = vitrail.load(tmp_path)
    image = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
    thresholds = {"score_threshold": 0.3, "mask_threshold": 0.4, "overlap_threshold": 0.05}
    stuff = ["LABEL_1", "LABEL_3"] if model.labels else ["1", "3"]
    (row,) = vitrail.predict(model, [image], panoptic=True, stuff=stuff, **thresholds)
    with torch.no_grad():
        outputs = theirs(model.preprocessing([Image.fromarray(image)]))
    size = {"shortest_edge": 32, "longest_edge": 32}
    (expected,) = transformers.EomtImageProcessor().post_process_panoptic_segmentation(
        outputs, [(side, side)], *thresholds.values(), [1, 3], size
    )
    infos = expected["segments_info"]
    assert len(infos) > 1
    assert [(segment.id, segment.index) for segment in row.segments] == [(i["id"] + 1, i["label_id"]) for i in infos]
    assert [segment.score for segment in row.segments] == pytest.approx([i["score"] for i in infos], abs=1e-4)
    assert [segment.thing for segment in row.segments] == [i["label_id"] not in (1, 3) for i in infos]
    same = row.segment_ids - 1 == expected["segmentation"].numpy()
    assert same.mean() > 0.995  # pixels at an edge, where two products are equal up to rounding


SPEC = MaskMatching(points=50)
LABELS = [[0, 3], [1, 2, 4], []]


def draw_targets():
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(len(c), 32, 32, generator=generator) > 0.6 for c in LABELS]
    none = torch.zeros(32, 32, dtype=torch.bool)
    return [MaskTargets(mask, torch.tensor(c).long(), none) for mask, c in zip(masks, LABELS, strict=True)]


def draw_predictions_and_points():
    generator = torch.Generator().manual_seed(4)
    predicted = QueryLogits(
        (torch.randn(3, 6, 16, 16, generator=generator) * 3).requires_grad_(),
        torch.randn(3, 6, 6, generator=generator).requires_grad_(),
    )
    return predicted, Points(*(torch.rand(3, n, 2, generator=generator) for n in (50, 150, 13)))


def test_the_matching_loss_and_its_gradients(monkeypatch):
    (predicted, points), targets = draw_predictions_and_points(), draw_targets()
    counts = torch.tensor([5.0, 5.0])
    loss = matching_loss(SPEC, predicted, points, targets, counts)
    repeats = torch.tensor([len(labels) for labels in LABELS])
    drawn = [points.matching[i : i + 1] for i in range(3)]
    drawn += [part.repeat_interleave(repeats, 0) for part in (points.candidates, points.others)]
    numbers = iter(drawn)

    def rand(*shape, device=None):
        found = next(numbers)
        assert found.shape == shape
        return found

    theirs = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SIZES))
    monkeypatch.setattr(torch, "rand", rand)
    masks, labels = [target.masks.float() for target in targets], [target.classes for target in targets]
    expected = theirs.get_loss(theirs.get_loss_dict(predicted.masks, predicted.classes, masks, labels, None))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(value, predicted) for value in (loss, expected)]
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_the_matching_is_that_of_transformers(monkeypatch):
    (predicted, points), targets = draw_predictions_and_points(), draw_targets()
    matcher = eomt.EomtHungarianMatcher(2.0, 5.0, 5.0, num_points=50)
    for image, (masks, labels, _) in enumerate(targets[:2]):
        where = points.matching[image : image + 1]
        monkeypatch.setattr(torch, "rand", lambda *shape, device=None, where=where: where)
        one = slice(image, image + 1)
        ((queries, found),) = matcher(predicted.masks[one], predicted.classes[one], [masks.float()], [labels])
        sampled = sample_points(predicted.masks[image], where.expand(6, -1, -1))
        wanted = sample_points(masks.float(), where.expand(len(masks), -1, -1))
        actual = match_queries(SPEC, sampled, predicted.classes[image], wanted, labels, torch.ones(wanted.shape[1]))
        assert torch.equal(actual[0], queries)
        assert torch.equal(actual[1], found)


# --- files ---


@pytest.mark.parametrize("sizes", [{}, {"use_swiglu_ffn": True, "mlp_ratio": 4}, {"num_register_tokens": 0}])
def test_files_are_read_and_written_both_ways(sizes, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**{**SIZES, **sizes})).eval()
    theirs.attn_mask_probs.zero_()
    theirs.save_pretrained(tmp_path / "theirs")
    model = vitrail.load(tmp_path / "theirs")
    assert model.config.decoder == EoMT(queries=6, blocks=3, upscales=2)
    assert model.config.classes == 5
    (actual,), expected = model.predict_queries(draw_images()), theirs(draw_images())
    torch.testing.assert_close(actual.masks, expected.masks_queries_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.classes, expected.class_queries_logits, rtol=1e-4, atol=1e-4)
    convert(tmp_path / "theirs", tmp_path / "ours.safetensors", "vitrail")
    report = convert(tmp_path / "ours.safetensors", tmp_path / "again", "hf")
    assert report.largest_difference == pytest.approx(0, abs=1e-4)
    again, loading = transformers.EomtForUniversalSegmentation.from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert set(loading["missing_keys"]) <= {"criterion.empty_weight"}  # set to its own value
    assert not loading["unexpected_keys"]
    found = again.eval()(draw_images())
    torch.testing.assert_close(found.masks_queries_logits, expected.masks_queries_logits)
    torch.testing.assert_close(again.criterion.empty_weight, theirs.criterion.empty_weight)


def test_the_processor_of_a_repository_becomes_a_squash(tmp_path):
    transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**SIZES)).save_pretrained(tmp_path)
    size = {"shortest_edge": 32, "longest_edge": 32}
    transformers.EomtImageProcessor(size=size, do_pad=True).save_pretrained(tmp_path)
    pipeline = vitrail.load(tmp_path).preprocessing
    assert (pipeline.size, pipeline.fit) == ((32, 32), "squash")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "linear", "layer_scale": 1.0}, "its decoder is LinearDecoder"),
        ({"decoder": EoMT(2, 1, 1)}, "it has a class token and LayerScale"),
    ],
)
def test_models_that_the_format_lacks_are_refused(options, message, tmp_path):
    options = {"position": Learned1D(prefix="none"), "image_size": 32, **options}
    model = build_segmenter(classes=3, patch=8, width=32, depth=1, heads=4, **options)
    vitrail.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "model.safetensors", tmp_path / "out", "hf")
