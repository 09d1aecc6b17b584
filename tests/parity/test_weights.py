"""Every row of the conversion table: detected, loaded, converted and read back bit for bit."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.parity.made import CASES, Case
from vitrail.checkpoints import TARGET_NAMES
from vitrail.checkpoints.convert import collect_assumptions, convert, is_bit_identical
from vitrail.checkpoints.formats.timm import build_timm_arguments
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.checkpoints.targets import restate_config
from vitrail.models.bit import BiT


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def out_for(folder, to):
    return folder / {"hf": "hf", "big_vision": "out.npz", "torchvision": "out.pth"}.get(to, f"{to}.safetensors")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_checkpoint_gives_the_peers_logits_and_round_trips(case: Case, tmp_path):
    (tmp_path / "in").mkdir()
    made = case.make(tmp_path / "in")
    with inspect_checkpoint(made.path, made.assume) as found:
        assert found.detection.format == case.form
        assert found.detection.is_complete
        assert set(found.detection.ignored.values()) == set(case.left_out)
        ours = found.read_state()
    model = vitrail.load(made.path, assume=made.assume)
    with torch.inference_mode():
        assert relative(model(made.image), made.answer) <= 1e-4

    for to in TARGET_NAMES:
        out = out_for(tmp_path, to)
        if to != "vitrail" and to not in case.targets.split():
            with pytest.raises(ValueError, match=r"cannot express this model: |does not support BiT ResNets"):
                convert(made.path, out, to, assume=made.assume)
            assert not out.exists()
            continue
        proof = convert(made.path, out, to, assume=made.assume)
        assert proof.largest_difference <= 1e-5 * max(1.0, proof.largest_logit)
        assume = {} if to == "vitrail" else collect_assumptions(model.config)
        with inspect_checkpoint(out, assume) as back:
            returned = back.read_state()
        if not any(
            "position" in note or "projection" in note or "a bias of zeros" in note for note in proof.notes
        ):  # else it is said otherwise
            assert set(returned) == set(ours)
            assert all(is_bit_identical(returned[name], ours[name]) for name in ours)
        if not isinstance(model, BiT):
            again = vitrail.load(out, assume=assume)
            with torch.inference_mode():
                assert relative(again(made.image), made.answer) <= 1e-4
        if (answered := opened_by_peer(to, out, model, made)) is not None:
            assert relative(answered, made.answer) <= 1e-4

    own_form = HOMES[case.form]  # and back to where it came from, against the file itself
    if own_form in case.targets.split():
        convert(tmp_path / "vitrail.safetensors", tmp_path / f"back-{out_for(tmp_path, own_form).name}", own_form)
        back_path = tmp_path / f"back-{out_for(tmp_path, own_form).name}"
        with (
            inspect_checkpoint(made.path, made.assume) as first,
            inspect_checkpoint(back_path, collect_assumptions(model.config)) as last,
        ):
            assert last.detection.is_complete
            theirs = {
                name.removeprefix(first.detection.root): first.source.read(name) for name in first.detection.loaded
            }
            ours = {name.removeprefix(last.detection.root): last.source.read(name) for name in last.detection.loaded}
            if not SAID_OTHERWISE.get(case.form):
                assert set(ours) == set(theirs)
            for name in set(ours) & set(theirs):
                assert is_bit_identical(ours[name], theirs[name]), name


# Where a checkpoint's own form is written, and the two that are written in another spelling of it.
HOMES = {
    "timm": "timm",
    "timm bit": "timm",
    "deit3": "timm",
    "dinov2": "dinov2",
    "dinov3": "dinov3",
    "timm dinov3": "timm",
    "timm eva": "timm",
    "timm eva, split": "timm",
    "transformers dinov3_vit": "hf",
    "clip": "clip",
    "transformers vit": "hf",
    "transformers vit_msn": "hf",
    "transformers deit": "hf",
    "transformers dinov2": "hf",
    "transformers dinov2_with_registers": "hf",
    "beit": "timm",
    "transformers beit": "hf",
    "transformers data2vec_vision": "hf",
    "vision_transformer": "big_vision",
    "big_vision": "big_vision",
    "big_vision scanned": "big_vision",
    "torchvision": "torchvision",
    "torchvision old": "torchvision",
    "vit-pytorch": "vit-pytorch",
    "vit-pytorch simple": "vit-pytorch",
}
SAID_OTHERWISE = {"deit3": True, "big_vision scanned": True, "torchvision old": True}


# --- what others make of what we wrote ---


def opened_by_peer(to, path, model, made):
    """Return the outputs of the other project's code with our file; None if it has no code for it."""
    if made.peer is not None and (to, type(made.peer).__module__.partition(".")[0]) in STRICT:
        state = torch.load(path, weights_only=True) if path.suffix == ".pth" else load_file(path)
        for parameter in made.peer.parameters():
            torch.nn.init.zeros_(parameter)
        made.peer.load_state_dict(state, strict=True)
        with torch.inference_mode():
            return made.peer.eval()(made.image)
    opened = OPENED.get(to)
    return None if opened is None else opened(path, model, made.image)


STRICT = {("timm", "timm"), ("clip", "open_clip"), ("vit-pytorch", "vit_pytorch")}


def by_timm(path, model, image):
    """Load into timm's own class, strictly."""
    given = build_timm_arguments(restate_config("timm", model.config))
    if given is None:
        return None
    from functools import partial

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
    """Load with timm's own loader of Google's files."""
    given = build_timm_arguments(model.config)
    if given is None or type(model.config.head).__name__ == "PreLogits":
        return None
    from functools import partial

    from timm.models.vision_transformer import VisionTransformer

    peer = VisionTransformer(**given, norm_layer=partial(torch.nn.LayerNorm, eps=model.config.eps))
    peer.load_pretrained(str(path))
    with torch.inference_mode():
        return peer.eval()(image)


def by_transformers(path, model, image):
    """Load with `from_pretrained`, which must find every tensor."""
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


def test_student_of_a_dino_run_can_be_selected(tmp_path):
    made = CASES["DINO"].make(tmp_path)
    teacher, student = vitrail.load(made.path), vitrail.load(made.path, take="student")
    assert not torch.equal(teacher.state_dict()["pool.norm.weight"], student.state_dict()["pool.norm.weight"])
    with pytest.raises(ValueError, match=r"there is no 'ema' in it: it has student, teacher"):
        vitrail.load(made.path, take="ema")


def test_jax_bfloat16_arrays_are_read(tmp_path):
    made = CASES["big_vision"].make(tmp_path)
    arrays = dict(np.load(made.path))
    whole = vitrail.load(made.path)
    halved = {
        name: torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("V2") for name, value in arrays.items()
    }
    np.savez(tmp_path / "half.npz", **halved)
    with inspect_checkpoint(tmp_path / "half.npz") as found:
        assert found.dtypes == [torch.bfloat16]
    model = vitrail.load(tmp_path / "half.npz")
    weight = "blocks.0.msa.qkv.weight"
    assert torch.equal(model.state_dict()[weight], whole.state_dict()[weight].bfloat16().float())


def test_pipelines_equal_torchvisions():
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    from vitrail.checkpoints.formats.torchvision import default_preprocessing

    sizes = {"b": "B", "l": "L", "h": "H"}
    seen = 0
    for name in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"):
        _, letter, patch = name.split("_")
        for weights in torchvision.models.get_model_weights(name):
            theirs = weights.transforms()
            config = vitrail.configure(f"{sizes[letter]}/{patch}", image_size=theirs.crop_size[0])
            ours, _ = default_preprocessing(config, weights.url.rpartition("/")[2].removesuffix(".pth"))
            assert ours.size == (theirs.crop_size[0],) * 2
            assert ours.resize == (theirs.resize_size[0],) * 2, weights
            assert ours.interpolation == theirs.interpolation.value
            assert (list(ours.mean), list(ours.std)) == (theirs.mean, theirs.std)
            seen += 1
    assert seen == 10


def test_processor_smaller_than_its_model_is_kept(tmp_path):
    """DINOv2's models have 518 pixels and its processor gives 224: both projects resample positions."""
    import json

    made = CASES["transformers DINOv2"].make(tmp_path)
    settings = {"crop_size": 48, "size": {"shortest_edge": 56}, "do_center_crop": True, "resample": 3}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (made.path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = vitrail.load(made.path)
    assert model.config.image_size == (64, 64)
    assert (model.preprocessing.size, model.preprocessing.resize) == ((48, 48), (56, 56))
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 7)


@pytest.mark.parametrize("name", ["beit3_base_patch16_224", "vit_small_patch16_rope_ape_224", "eva02_base_patch14_224"])
def test_unsupported_architecture_in_the_file_name_is_refused(name, tmp_path):
    made = CASES["timm AugReg"].make(tmp_path)
    with pytest.raises(ValueError, match=f"unsupported architecture {name}"):
        vitrail.load(made.path.rename(tmp_path / f"{name}.safetensors"))
    harmless = tmp_path / f"{name}.safetensors"
    for other in ("europe", "a_parallel_run", "evaluation", "dinosaurs"):
        harmless = harmless.rename(tmp_path / f"{other}.safetensors")
        assert vitrail.load(harmless).preprocessing.mean == (0.5, 0.5, 0.5)
