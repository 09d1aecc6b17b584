"""Both towers of CLIP-like models compute what OpenCLIP and transformers compute, with the weights of their files."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.parity.peers import TOLERANCE, relative_difference
from tests.parity.towers import PEERS, compute, compute_loss, make_batch, make_peer, read_state
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.keys import import_state
from vitrail.checkpoints.load import inspect_checkpoint


@pytest.fixture(params=PEERS)
def name(request) -> str:
    return request.param


@pytest.fixture
def path(name, tmp_path):
    save_file(read_state(make_peer(name)), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_features_and_logits_are_the_peers(name, path):
    peer, (images, tokens) = make_peer(name), make_batch()
    model = vitrail.load_towers(path, assume=PEERS[name].assume)
    with_images, with_texts, logits = compute(peer, images, tokens)
    assert relative_difference(model.encode_images(images), with_images) <= TOLERANCE
    assert relative_difference(model.encode_texts(tokens), with_texts) <= TOLERANCE
    assert relative_difference(model(images, tokens), logits) <= TOLERANCE


def test_image_tower_alone_is_what_load_gives(name, path):
    peer, (images, tokens) = make_peer(name), make_batch()
    assume = {key: value for key, value in PEERS[name].assume.items() if not key.startswith("text_")}
    model = vitrail.load(path, assume=assume)
    both = vitrail.load_towers(path, assume=PEERS[name].assume)
    assert model.config == both.config.image
    assert relative_difference(torch.nn.functional.normalize(model(images)), compute(peer, images, tokens)[0]) <= 1e-4


def test_files_convert_both_ways_bit_for_bit(name, path, tmp_path):
    case = PEERS[name]
    with inspect_checkpoint(path, case.assume, towers=True) as checkpoint:
        assert checkpoint.detection.format == case.form
    ours = tmp_path / "ours.safetensors"
    convert(path, ours, "vitrail", assume=case.assume, text_tower=True)
    model, again = vitrail.load_towers(path, assume=case.assume), vitrail.load_towers(ours)
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())
    back = tmp_path / ("hf" if case.target == "hf" else "back.safetensors")
    convert(ours, back, case.target, text_tower=True)
    written = load_file(back / "model.safetensors" if case.target == "hf" else back)
    theirs = read_state(make_peer(name))
    renamed = {key.removeprefix("text."): tensor for key, tensor in written.items()} if name == "custom" else written
    theirs = {key.removeprefix("text."): tensor for key, tensor in theirs.items()} if name == "custom" else theirs
    assert sorted(renamed) == sorted(theirs)
    assert all(torch.equal(tensor, renamed[key]) for key, tensor in theirs.items())


@pytest.mark.parametrize("name", ["clip", "clip eos", "siglip"])
def test_transformers_opens_what_is_written(name, path, tmp_path):
    import transformers

    convert(path, tmp_path / "hf", "hf", assume=PEERS[name].assume, text_tower=True)
    images, tokens = make_batch()
    reopened = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
    expected = compute(make_peer(name), images, tokens)[2]
    assert relative_difference(compute(reopened, images, tokens)[2], expected) <= 1e-6
    again = vitrail.load_towers(tmp_path / "hf")  # config.json has all facts
    assert relative_difference(again(images, tokens), expected) <= TOLERANCE


def test_losses_and_gradients_are_the_peers(name, path):
    from vitrail.objectives.contrastive import Contrastive

    peer, (images, tokens) = make_peer(name), make_batch()
    assume = PEERS[name].assume
    model = vitrail.load_towers(path, assume=assume)
    loss = Contrastive("sigmoid" if model.config.logit_bias else "softmax").build(model)(images, tokens)["loss"]
    expected = compute_loss(peer, images, tokens)
    assert relative_difference(loss, expected) <= TOLERANCE
    loss.backward()
    expected.backward()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(parameter.grad)
    with inspect_checkpoint(path, assume, towers=True) as checkpoint:
        gradients = import_state(checkpoint.detection.table, read_state(peer))
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, parameter in model.named_parameters():
        scale = max(float(gradients[key].abs().max()), 1e-3 * largest)
        assert float((parameter.grad - gradients[key]).abs().max()) <= TOLERANCE * scale, key
