"""Every row of the table of formats: made by others, recognised, loaded, converted and brought back bit for bit."""

import numpy as np
import pytest
import torch

import vitrail
from tests.parity.made import CASES, Case
from vitrail.checkpoints.convert import NAMES, as_said, convert, same_bits, untold
from vitrail.checkpoints.loading import describe
from vitrail.checkpoints.timm import arguments
from vitrail.models.bit import BiT


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def out_for(folder, to):
    return folder / {"hf": "hf", "big_vision": "out.npz", "torchvision": "out.pth"}.get(to, f"{to}.safetensors")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_of_others_gives_their_logits_and_goes_there_and_back(case: Case, tmp_path):
    (tmp_path / "in").mkdir()
    made = case.make(tmp_path / "in")
    with describe(made.path, made.assume) as found:
        assert found.reading.form == case.form
        assert found.reading.whole
        assert set(found.reading.left_out.values()) == set(case.left_out)
        ours = found.state()
    model = vitrail.load(made.path, assume=made.assume)
    with torch.inference_mode():
        assert relative(model(made.image), made.answer) <= 1e-4

    for to in NAMES:
        out = out_for(tmp_path, to)
        if to != "vitrail" and to not in case.targets.split():
            with pytest.raises(ValueError, match="cannot express this model: "):
                convert(made.path, out, to, assume=made.assume)
            assert not out.exists()
            continue
        proof = convert(made.path, out, to, assume=made.assume)
        assert proof.largest_difference <= 1e-5 * max(1.0, proof.largest_logit)
        told = {} if to == "vitrail" else untold(model.config)
        with describe(out, told) as back:
            returned = back.state()
        if not any("position" in note or "projection" in note for note in proof.notes):  # else it is said otherwise
            assert set(returned) == set(ours)
            assert all(same_bits(returned[name], ours[name]) for name in ours)
        if not isinstance(model, BiT):
            again = vitrail.load(out, assume=told)
            with torch.inference_mode():
                assert relative(again(made.image), made.answer) <= 1e-4
        opened = OPENED.get(to)
        if opened is not None and (answered := opened(out, model, made.image)) is not None:
            assert relative(answered, made.answer) <= 1e-4


# --- what others make of what we wrote ---


def by_timm(path, model, image):
    """timm's own class, strictly."""
    given = arguments(as_said("timm", model.config))
    if given is None:
        return None
    from functools import partial

    from safetensors.torch import load_file
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    state = load_file(path)
    distilled = model.config.prefix.outputs == 2
    norm = partial(torch.nn.LayerNorm, eps=model.config.eps)
    peer = (VisionTransformerDistilled if distilled else VisionTransformer)(**given, norm_layer=norm)
    peer.load_state_dict(state, strict=True)
    with torch.inference_mode():
        return peer.eval()(image)


def by_timm_from_npz(path, model, image):
    """timm's own loader of Google's files."""
    given = arguments(model.config)
    if given is None or type(model.config.head).__name__ == "PreLogits":
        return None
    from functools import partial

    from timm.models.vision_transformer import VisionTransformer

    peer = VisionTransformer(**given, norm_layer=partial(torch.nn.LayerNorm, eps=model.config.eps))
    peer.load_pretrained(str(path))
    with torch.inference_mode():
        return peer.eval()(image)


def by_transformers(path, model, image):
    """`from_pretrained`, which is to find every tensor."""
    import transformers

    kind = "AutoModel" if model.config.classes is None else "AutoModelForImageClassification"
    if model.config.prefix.outputs == 2:
        kind = "DeiTForImageClassificationWithTeacher"
    peer, about = getattr(transformers, kind).from_pretrained(path, output_loading_info=True)
    pooler = {name for name in about["missing_keys"] if name.startswith("pooler.")}  # a body has one, ours need not
    assert set(about["missing_keys"]) == pooler
    assert not about["unexpected_keys"]
    with torch.inference_mode():
        answered = peer.eval()(image)
    if model.config.classes is not None:
        return answered.logits
    return answered.last_hidden_state[:, 0] if pooler or "Dinov2" in type(peer).__name__ else answered.pooler_output


def by_torchvision(path, model, image):
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    config, hidden = model.config, getattr(model.config.head, "hidden", 0)
    from functools import partial

    peer = torchvision.models.VisionTransformer(
        config.image_size[0],
        config.embed.patch,
        config.size.depth,
        config.size.heads,
        config.size.width,
        config.size.mlp,
        num_classes=config.classes or 1,
        representation_size=None if hidden == 0 else hidden or config.size.width,
        norm_layer=partial(torch.nn.LayerNorm, eps=config.eps),
    )
    gelu = type(config.block.mlp).__name__
    if config.classes is None or config.channels != 3 or gelu != "GELU":
        return None
    peer.load_state_dict(torch.load(path, weights_only=True), strict=True)
    with torch.inference_mode():
        return peer.eval()(image)


OPENED = {"timm": by_timm, "hf": by_transformers, "big_vision": by_timm_from_npz, "torchvision": by_torchvision}


def test_the_student_of_a_dino_run_can_be_taken(tmp_path):
    made = CASES["DINO"].make(tmp_path)
    teacher, student = vitrail.load(made.path), vitrail.load(made.path, take="student")
    assert not torch.equal(teacher.state_dict()["pool.norm.weight"], student.state_dict()["pool.norm.weight"])
    with pytest.raises(ValueError, match=r"there is no 'ema' in it: it has student, teacher"):
        vitrail.load(made.path, take="ema")


def test_bfloat16_arrays_of_jax_are_read(tmp_path):
    made = CASES["big_vision"].make(tmp_path)
    arrays = dict(np.load(made.path))
    whole = vitrail.load(made.path)
    halved = {
        name: torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("V2") for name, value in arrays.items()
    }
    np.savez(tmp_path / "half.npz", **halved)
    with describe(tmp_path / "half.npz") as found:
        assert found.dtypes == [torch.bfloat16]
    model = vitrail.load(tmp_path / "half.npz")
    weight = "blocks.0.msa.qkv.weight"
    assert torch.equal(model.state_dict()[weight], whole.state_dict()[weight].bfloat16().float())
