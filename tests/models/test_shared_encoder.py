"""One encoder for images, clips, sounds and texts: shared layers, features, files, and the models of single modalities."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vitrail
from vitrail.checkpoints.io.safetensors import SafetensorsFile
from vitrail.data.clip import Clip
from vitrail.data.log_mel import LogMel
from vitrail.models.shared_encoder import SharedEncoder, configure_shared
from vitrail.models.sizes import Size
from vitrail.models.text import TextConfig
from vitrail.objectives.contrastive import supervised_loss

SIZES = {"width": 32, "depth": 2, "heads": 2, "channels": 1, "classes": None}
TEXT = TextConfig(Size(depth=2, width=32, mlp=128, heads=2), None, vocabulary=600, context=16, eps=1e-6)
CONFIGS = {
    "images": vitrail.configure(patch=4, image_size=16, **SIZES),
    "clips": vitrail.configure(patch=8, image_size=16, frames=4, tubelet=2, **SIZES),
    "sounds": vitrail.configure(patch=8, image_size=(16, 24), **SIZES),
    "texts": TEXT,
}
BATCHES = {
    "images": torch.randn(3, 1, 16, 16),
    "clips": torch.randn(2, 1, 4, 16, 16),
    "sounds": torch.randn(4, 1, 16, 24),
    "texts": torch.randint(600, (2, 16)),
}


def make_shared(features: int | None = 24) -> SharedEncoder:
    torch.manual_seed(0)
    shared = SharedEncoder.build(CONFIGS, features=features).eval()
    square = {"mean": (0.5,), "std": (0.5,)}
    shared["images"].preprocessing = vitrail.Preprocessing((16, 16), (16, 16), **square)
    shared["clips"].preprocessing = vitrail.Preprocessing((16, 16), (16, 16), clip=Clip(4), **square)
    sound = LogMel(8000, 16, 200, 80)
    shared["sounds"].preprocessing = vitrail.Preprocessing((16, 24), (16, 24), mean=(-5.0,), std=(4.0,), sound=sound)
    return shared


def test_a_mixed_batch_becomes_unit_vectors_of_one_width() -> None:
    features = make_shared()(BATCHES)
    assert {name: tuple(rows.shape) for name, rows in features.items()} == {
        name: (len(batch), 24) for name, batch in BATCHES.items()
    }
    for rows in features.values():
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
        assert rows.std() > 0.01  # no head starts at zero


def test_layers_are_counted_once_and_trained_by_every_modality() -> None:
    shared = make_shared()
    alone = sum(p.numel() for name in shared for p in shared[name].parameters())
    layers = sum(p.numel() for p in shared.blocks.parameters())
    scale = 1
    assert sum(p.numel() for p in shared.parameters()) == alone - 3 * layers + scale
    for name, batch in BATCHES.items():
        shared.zero_grad()
        shared.encode(name, batch).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in shared.blocks.parameters() if p.ndim > 1), (
            name
        )
        for other in set(BATCHES) - {name}:
            own = [p for key, p in shared[other].named_parameters() if not key.startswith("blocks.")]
            assert all(p.grad is None or not p.grad.any() for p in own), (name, other)


def test_a_step_on_sounds_changes_the_features_of_images() -> None:
    shared = make_shared()
    before = shared.encode("images", BATCHES["images"]).detach()
    optimizer = torch.optim.SGD(shared.parameters(), lr=1.0)
    shared.encode("sounds", BATCHES["sounds"])[:, 0].sum().backward()
    optimizer.step()
    assert (shared.encode("images", BATCHES["images"]) - before).abs().max() > 1e-5


def test_a_model_taken_out_is_an_ordinary_one_with_the_same_outputs(tmp_path: Path) -> None:
    shared = make_shared()
    for name in ("images", "clips", "sounds"):
        vitrail.save(shared[name], tmp_path / f"{name}.safetensors")
        model = vitrail.load(tmp_path / f"{name}.safetensors")
        assert torch.equal(model(BATCHES[name]), shared[name](BATCHES[name]))
        assert model.preprocessing == shared[name].preprocessing
    classifier = shared["images"].replace_head(5)
    assert classifier(BATCHES["images"]).shape == (3, 5)


def test_two_towers_of_a_shared_encoder_are_read_back_from_their_file(tmp_path: Path) -> None:
    shared = make_shared()
    towers = shared.towers("images", "texts")
    expected = shared.logits(shared.encode("images", BATCHES["images"]), shared.encode("texts", BATCHES["texts"]))
    torch.testing.assert_close(towers(BATCHES["images"], BATCHES["texts"]), expected)
    vitrail.save(towers, tmp_path / "towers.safetensors")
    read = vitrail.load_towers(tmp_path / "towers.safetensors")
    torch.testing.assert_close(read(BATCHES["images"], BATCHES["texts"]), expected)
    with pytest.raises(ValueError, match="towers need images and texts, got 'texts' and 'images'"):
        shared.towers("texts", "images")


def test_a_file_holds_the_layers_once_and_reads_back_bit_for_bit(tmp_path: Path) -> None:
    shared, file = make_shared(), tmp_path / "shared.safetensors"
    vitrail.save_shared(shared, file, licence="MIT")
    with SafetensorsFile(file) as source:
        names = list(source.specs)
    assert len([name for name in names if name.endswith("blocks.0.msa.qkv.weight")]) == 1
    read = vitrail.load_shared(file)
    assert read.config == shared.config
    assert not read.training
    for name, batch in BATCHES.items():
        assert torch.equal(read.encode(name, batch), shared.encode(name, batch)), name
    assert read["images"].blocks is read["texts"].blocks
    assert read["sounds"].preprocessing == shared["sounds"].preprocessing
    assert read["images"].card["licence"] == "MIT"
    read.train()
    read(BATCHES)["texts"].sum().backward()  # its parameters are ordinary ones


def test_take_reads_one_modality_of_a_file_as_an_ordinary_model(tmp_path: Path) -> None:
    shared, file = make_shared(), tmp_path / "shared.safetensors"
    vitrail.save_shared(shared, file)
    for name in ("images", "clips", "sounds"):
        model = vitrail.load(file, take=name)
        assert torch.equal(model(BATCHES[name]), shared[name](BATCHES[name]))
        assert model.preprocessing == shared[name].preprocessing
    wide = vitrail.load(file, take="images", image_size=24, classes=7)
    assert wide(torch.zeros(1, 1, 24, 24)).shape == (1, 7)


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (None, "a shared encoder of several modalities: choose one with take=NAME, of images, clips, sounds"),
        ("smells", "take='smells' is none of images, clips, sounds"),
        ("texts", "take='texts' is its text tower: use vitrail.load_shared"),
    ],
)
def test_a_modality_that_cannot_be_read_is_named(tmp_path: Path, take: str | None, words: str) -> None:
    vitrail.save_shared(make_shared(), tmp_path / "shared.safetensors")
    with pytest.raises(ValueError, match=words):
        vitrail.load(tmp_path / "shared.safetensors", take=take)


def test_other_files_are_no_shared_encoders(tmp_path: Path) -> None:
    shared = make_shared()
    vitrail.save(shared["images"], tmp_path / "images.safetensors")
    with pytest.raises(ValueError, match=r"not a shared encoder: use vitrail.load"):
        vitrail.load_shared(tmp_path / "images.safetensors")
    with pytest.raises(ValueError, match="it holds one model and no 'images'"):
        vitrail.load(tmp_path / "images.safetensors", take="images")
    vitrail.save_shared(shared, tmp_path / "shared.safetensors")
    with pytest.raises(ValueError, match="not two towers"):
        vitrail.load_towers(tmp_path / "shared.safetensors")
    data = bytearray((tmp_path / "shared.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "shared.safetensors").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"damaged: the checksum of .* differs"):
        vitrail.load_shared(tmp_path / "shared.safetensors")


def test_modalities_that_do_not_fit_together_are_refused() -> None:
    images = CONFIGS["images"]
    wide = vitrail.configure(patch=4, image_size=16, **{**SIZES, "width": 64})
    with pytest.raises(ValueError, match="width of images is 32, of sounds 64: layers that are shared must be equal"):
        configure_shared({"images": images, "sounds": wide})
    with pytest.raises(ValueError, match="eps of images is 1e-06, of texts 1e-05"):
        configure_shared({"images": images, "texts": replace(TEXT, eps=1e-5)})
    with pytest.raises(ValueError, match="images must end in features, got 3 classes"):
        configure_shared({"images": images.with_classes(3)})
    with pytest.raises(ValueError, match="the same number of features, got images 32, texts 8"):
        SharedEncoder.build({"images": images, "texts": replace(TEXT, features=8)})
    with pytest.raises(ValueError, match="invalid modality 'blocks'"):
        configure_shared({"blocks": images})
    with pytest.raises(ValueError, match=r"a shared encoder \(images\) does not support Swin Transformers"):
        configure_shared({"images": vitrail.configure("Swin-T", classes=None)})
    with pytest.raises(ValueError, match="at least one modality"):
        configure_shared({})
    with pytest.raises(KeyError, match="unknown modality 'smells': known are images, clips, sounds, texts"):
        make_shared()["smells"]


def test_values_that_are_not_finite_and_other_preprocessing_are_not_saved(tmp_path: Path) -> None:
    shared = make_shared()
    shared["images"].preprocessing = vitrail.Preprocessing()
    with pytest.raises(ValueError, match="preprocessing of images gives 3 channels, the model takes 1"):
        vitrail.save_shared(shared, tmp_path / "shared.safetensors")
    shared = make_shared()
    with torch.no_grad():
        shared.blocks[0].norm1.weight[0] = torch.nan
    with pytest.raises(ValueError, match="not saved: values that are not finite"):
        vitrail.save_shared(shared, tmp_path / "shared.safetensors")
    assert not (tmp_path / "shared.safetensors").exists()


# --- the loss with several positives ---


def test_the_supervised_loss_is_that_of_the_paper_and_with_pairs_that_of_simclr() -> None:
    features = F.normalize(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), dim=1)

    def logits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 7 * a @ b.T

    labels = torch.tensor([0, 1, 0, 2, 1, 0])
    terms = []  # equation 2 of Khosla et al., sample by sample; sample 3 is alone with its label
    for i in (0, 1, 2, 4, 5):
        others = [j for j in range(6) if j != i]
        total = sum(float((7 * features[i] @ features[j]).exp()) for j in others)
        positives = [j for j in others if labels[j] == labels[i]]
        logs = [float(7 * features[i] @ features[j]) - torch.tensor(total).log().item() for j in positives]
        terms.append(-sum(logs) / len(logs))
    assert supervised_loss(logits, features, labels).item() == pytest.approx(sum(terms) / 5, rel=1e-5)

    similar = logits(features, features).fill_diagonal_(-torch.inf)
    pairs = torch.tensor([1, 0, 3, 2, 5, 4])
    loss = supervised_loss(logits, features, torch.tensor([0, 0, 1, 1, 2, 2]))
    torch.testing.assert_close(loss, F.cross_entropy(similar, pairs))
    with pytest.raises(ValueError, match="no two samples have the same label: give larger batches"):
        supervised_loss(logits, features, torch.arange(6))
