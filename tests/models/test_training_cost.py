"""Memory, communication and time of a training, computed from the cost of a model."""

import json

import pytest

from vitrail.cli import main
from vitrail.models.registry import configure
from vitrail.models.training_cost import Cluster, estimate_training

B16 = configure("B/16", image_size=(224, 224), channels=3, classes=1000)
PARAMS = 86_567_656


def test_state_is_divided_by_the_processes_that_share_it() -> None:
    cost = estimate_training(B16, Cluster(gpus=64, gpus_per_host=8, batch_size=4096))
    assert cost.parameters == PARAMS
    assert [layout.layout for layout in cost.layouts] == ["ddp", "fsdp", "hsdp"]
    for layout, shards in zip(cost.layouts, (1, 64, 8), strict=True):
        assert layout.weights == layout.gradients == layout.ema == -(-4 * PARAMS // shards)
        assert layout.moments == 2 * layout.weights
        assert layout.activations == cost.layouts[0].activations
    assert cost.layouts[0].total > cost.layouts[2].total > cost.layouts[1].total


def test_communication_is_that_of_rings() -> None:
    whole = 4 * PARAMS
    ddp, fsdp, hsdp = estimate_training(B16, Cluster(gpus=16, gpus_per_host=4, batch_size=64)).layouts
    assert ddp.sent_by_gpu == ddp.sent_by_host == 2 * (whole * 15 // 16)
    assert fsdp.sent_by_gpu == fsdp.sent_by_host == 3 * (whole * 15 // 16)
    assert hsdp.sent_by_gpu == 3 * (whole * 3 // 4) + 2 * ((whole // 4) * 3 // 4)
    assert hsdp.sent_by_host == 4 * 2 * ((whole // 4) * 3 // 4)
    accumulated = estimate_training(B16, Cluster(gpus=16, gpus_per_host=4, batch_size=64, accumulate=4)).layouts
    assert accumulated[0].sent_by_gpu == ddp.sent_by_gpu  # gradients with the last micro-batch
    assert accumulated[1].sent_by_gpu == 9 * (whole * 15 // 16)
    (one, *_) = estimate_training(B16, Cluster(gpus=8, batch_size=64)).layouts
    assert one.sent_by_host == 0
    (alone, *_) = estimate_training(B16, Cluster(gpus=1, batch_size=8, precision="fp32")).layouts
    assert (alone.sent_by_gpu, alone.working) == (0, 0)


def test_time_follows_from_the_peak_and_the_assumed_share() -> None:
    given = Cluster(gpus=8, batch_size=1024, tflops=100, utilisation=0.5, images=10_240, epochs=3, network=50)
    cost = estimate_training(B16, given)
    assert cost.step_seconds == pytest.approx(cost.flops_per_image * 1024 / (8 * 100e12 * 0.5))
    assert cost.steps == 30
    assert cost.hours == pytest.approx(30 * cost.step_seconds / 3600)
    assert estimate_training(B16, Cluster()).hours is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "gpus must be > 0, got 0"),
        ({"utilisation": 1.5}, "utilisation must be > 0 and <= 1, got 1.5"),
        ({"gpus": 12}, "12 GPUs cannot be divided by gpus_per_host=8"),
        ({"gpus": 8, "batch_size": 100}, "batch_size=100 cannot be divided by 8 GPUs"),
        ({"batch_size": 24, "accumulate": 2}, "batch_size=24 cannot be divided by 8 GPUs and accumulate=2"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**values)  # type: ignore[arg-type]


def test_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["describe", "Ti/16", "--training", "--gpus", "16", "--batch-size", "256", "--tflops", "312"]
    assert main([*options, "--images", "1000", "--network", "25"]) == 0
    out = capsys.readouterr().out
    assert "training on 16 GPUs, 2 × 8: 256 images a step, 16 per GPU at a time, bf16" in out
    assert "40 % (assumed) of 312 TFLOP/s per GPU (given)" in out
    assert "not measured" in out
    assert main([*options, "--json"]) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["local_batch"] == 16
    assert training["layouts"][2]["total"] > 0
    assert main(["describe", "Ti/16", "--gpus", "16"]) == 2
    assert "--gpus needs --training: give it too" in capsys.readouterr().err
    assert main(["describe", "Ti/16", "--training", "--batch-size", "100"]) == 2
    assert "--batch-size 100 cannot be divided by 8 GPUs" in capsys.readouterr().err
    assert main(["describe", "model.safetensors", "--training"]) == 2
    assert "--training is for architectures, such as L/16: leave it out" in capsys.readouterr().err
