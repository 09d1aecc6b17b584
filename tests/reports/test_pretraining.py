"""Report page of self-supervised runs: signals, collapse alarm, reconstructions, next steps."""

import json
import re

import pytest

from tests.reports.made import made_run
from tests.reports.made_pretraining import made_pretraining
from tests.reports.test_page import HOSTILE, parsed
from vitrail.cli import main
from vitrail.reports.compare import compare_runs, format_run_comparison, render_comparison
from vitrail.reports.page import render_run_page, write_report
from vitrail.reports.pretraining import format_retry_command, render_advice
from vitrail.reports.run import read_run
from vitrail.reports.summary import format_headline


def changed(run, name, **values):
    path = run / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def sections(html):
    return re.findall(r'<section id="(\w+)"', html)


def charts(html):
    return re.findall(r"<figcaption><h3>([^<]+)</h3>", html)


def words(markup):
    return re.sub(r"<[^>]+>", "", markup).replace("\u00a0", " ")


@pytest.mark.parametrize("method", ["mpp", "mae", "dino", "features"])
@pytest.mark.parametrize("kinds", [{}, {"labels": ()}, {"finished": False}], ids=str)
def test_page_of_every_method_and_state(tmp_path, method, kinds):
    html = render_run_page(read_run(made_pretraining(tmp_path / "run", method=method, **kinds)))
    tags = parsed(html)
    assert tags.seen.count("h1") == 1
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert " 0 classes" not in html
    assert ("results" in sections(html)) is ("labels" not in kinds and "finished" not in kinds)
    assert ("reconstructions" in sections(html)) is (method in ("mae", "mpp"))
    assert ("big.safetensors, 5,717,416 parameters" in words(html)) is (method == "features")
    assert ("Teacher entropy" in charts(html)) is (method == "dino")
    assert len(html) < 600_000


def test_sections_and_charts_of_the_page(tmp_path):
    path = write_report(made_pretraining(tmp_path / "run"))
    html = path.read_text(encoding="utf-8")
    assert sections(html) == [
        *("results", "signals", "next", "data", "model", "speed", "environment", "chosen", "recipe")
    ]
    assert charts(html) == [
        "k-NN accuracy",
        "Loss",
        "Feature spread",
        "Effective rank",
        "Teacher entropy",
        "Teacher diversity",
        "Learning rate",
        "Gradient norm",
        "Images per second",
    ]
    assert "10 classes (labels are used for evaluation only)" in html


def test_headline_with_knn_accuracy(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.4812, knn_interval=[0.4674, 0.4951])
    headline = format_headline(read_run(made)).replace("\u00a0", " ")
    assert headline == (
        "ViT of width 192, depth 9, patch 4 pretrained with DINO on cifar-10: "
        "k-NN accuracy 48.1 % (46.7–49.5), raw pixels 33.9 %"
    )


def test_headline_without_labels_has_loss_and_rank(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", labels=(), where="/data/photos")
    changed(made, "summary.json", loss=0.6434, rank=57.3)
    assert format_headline(read_run(made)).endswith("pretrained with MAE on photos: loss 0.643, effective rank 57.3")


def test_headline_of_an_unfinished_run(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", labels=(), finished=False)
    assert re.search(
        r": not finished, loss 0\.\d+, effective rank [\d.]+ after epoch 5$", format_headline(read_run(made))
    )
    assert "This run has not finished." in render_run_page(read_run(made))
    (made / "metrics.jsonl").unlink()
    assert format_headline(read_run(made)).endswith(": not finished, no metrics yet")


def test_knn_accuracy_is_compared_with_pixels_and_the_untrained_model(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.48, knn_interval=[0.466, 0.494], knn_pixels=0.34, knn_random=0.31, images=5000)
    text = words(render_run_page(read_run(made)))
    assert "The features are 14.0 points above raw pixels and 17.0 points above the untrained model." in text
    assert "46.6–49.4" in text
    assert "32.7–35.3" in text  # Wilson's for 1,700 of 5,000
    assert "may be chance" not in text


def test_overlapping_intervals_are_mentioned(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.30, knn_interval=[0.26, 0.34], knn_pixels=0.32, knn_random=0.2, images=500)
    text = words(render_run_page(read_run(made)))
    assert "2.0 points below raw pixels and 10.0 points above the untrained model." in text
    assert "The interval overlaps with that of raw pixels: the difference may be chance." in text


VERDICT = {
    "baselines": {
        "knn_random": {"finding": "better", "difference": 0.1, "interval": [0.0675, 0.1325], "p_value": 0.001},
        "knn_pixels": {"finding": "no clear difference", "difference": -0.004, "interval": [-0.029, 0.021]},
    },
    "suggestions": ["train longer (--epochs 50, now 12)"],
}


def test_verdict_stands_at_the_top_with_its_options_as_code(tmp_path):
    made = made_pretraining(tmp_path / "run")
    before = render_run_page(read_run(made))
    assert 'class="notice verdict' not in before  # a run of an earlier version
    changed(made, "summary.json", verdict=VERDICT)
    html = render_run_page(read_run(made))
    top = html.split('<section id="results"')[0]
    assert "Features are better than those of the untrained network by 10.0 points (6.8–13.2)." in words(top)
    assert "No clear difference from raw pixels: −0.4 points (−2.9 to 2.1)." in words(top)
    assert "What to try: train longer (<code>--epochs 50</code>, now 12)." in top
    assert "may be chance" not in html
    assert "are paired" in html


def test_advice_of_the_alarm_is_shown_once(tmp_path):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    changed(made, "summary.json", verdict=VERDICT | {"suggestions": ["a cause: an advice"]})
    html = render_run_page(read_run(made))
    assert "Features are better" in html
    assert "What to try" not in html


@pytest.mark.parametrize(
    "verdict", [{"baselines": {"knn_random": {"finding": "better"}}}, {"suggestions": [3]}, "better", {"reason": 1}]
)
def test_invalid_verdicts_are_named_and_left_out(tmp_path, verdict):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", verdict=verdict)
    run = read_run(made)
    assert "verdict" in run.problems[0]
    assert 'class="notice verdict' not in render_run_page(run)


def test_collapse_is_shown_with_cause_and_advice(tmp_path):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    run = read_run(made)
    assert format_headline(run).endswith("collapsed at step 600")
    html = render_run_page(run)
    assert "Collapse detected at step 600" in html
    assert "training was stopped" in html
    assert "<code>--set objective.centre=0.9</code>" in html
    assert "collapse detected" in html
    again = f"vitrail pretrain /data/cifar-10 --method dino --set objective.centre=0.9{chr(60)}"
    assert again in html.split('id="next"')[1]
    assert "--init" not in html.split('id="next"')[1].split("</section>")[0]


def test_a_healthy_run_has_no_alarm(tmp_path):
    html = render_run_page(read_run(made_pretraining(tmp_path / "run")))
    assert "ollapse detected" not in html
    assert "alarm" not in html.split("</style>")[1]


def test_reconstructions_are_rows_of_three_images(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", photographs=5)
    (made / "evaluation" / "reconstructions" / "03-masked.png").write_bytes(b"no picture")
    (made / "evaluation" / "reconstructions" / "xx-masked.png").write_bytes(b"not ours")
    html = render_run_page(read_run(made)).split('id="reconstructions"')[1].split("</section>")[0]
    assert html.count('class="triple"') == 5
    assert html.count("<img") == 14
    assert html.count("not stored") == 1
    for caption in ("image", "masked input", "reconstruction"):
        assert html.count(f"<figcaption>{caption}<") == 5


def test_next_steps_are_commands_for_this_run(tmp_path):
    with_labels = render_run_page(read_run(made_pretraining(tmp_path / "a")))
    model = tmp_path / "a" / "model.safetensors"
    for command in (
        f"vitrail train /data/cifar-10 --init {model}",
        f"vitrail evaluate {model} /data/cifar-10 --probe knn,linear",
        f"vitrail inspect {model} IMAGE.jpg --out inspection",
        f"vitrail convert {model} features.safetensors --to timm",
    ):
        assert command in with_labels
    without = render_run_page(read_run(made_pretraining(tmp_path / "b", labels=())))
    assert f"vitrail train LABELLED --init {tmp_path / 'b' / 'model.safetensors'}" in without


@pytest.mark.parametrize(
    ("command", "advice", "again"),
    [
        ("pretrain d --lr 0.3 --out r", "a lower learning rate, --lr 0.1.", "vitrail pretrain d --lr 0.1"),
        ("pretrain d --out=r --lr=0.3", "use --lr 0.1", "vitrail pretrain d --lr 0.1"),
        ("pretrain d --set a.b=1 --set a.c=2", "--set a.b=0.5, or so", "vitrail pretrain d --set a.c=2 --set a.b=0.5"),
        ("pretrain d", "think again", ""),
    ],
)
def test_advice_becomes_a_command(command, advice, again):
    assert format_retry_command(["vitrail", *command.split()], advice) == again


def test_options_in_advice_are_code():
    assert render_advice("<b> use --lr 0.1.") == "&lt;b&gt; use <code>--lr 0.1</code>."


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_of_a_run_is_escaped(tmp_path, hostile):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    changed(made, "run.json", method=hostile, command=["vitrail", hostile])
    changed(made, "summary.json", verdict={"reason": hostile, "suggestions": [hostile], "baselines": {}})
    changed(made, "summary.json", collapse={"cause": hostile, "advice": f"--lr {hostile}", "step": 600}, method=hostile)
    tags = parsed(render_run_page(read_run(made)))
    assert tags.seen.count("script") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]


def test_missing_numbers_are_left_out(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn="nan", rank=None, spread="nan", knn_pixels=None, knn_interval=[1])
    with (made / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "validation", "step": 1001, "epoch": 10.01, "loss": "nan", "spread": "nan", "rank": "nan"}\n'
        )
    html = render_run_page(read_run(made))
    assert "results" not in sections(html)
    assert "nan" not in words(html.split("</style>")[1].split('id="recipe"')[0]).lower().split()


def test_comparison_of_pretraining_runs(tmp_path):
    made = [
        made_pretraining(tmp_path / "mae", method="mae"),
        made_pretraining(tmp_path / "dino", lr=1e-3),
        made_pretraining(tmp_path / "fallen", collapsed=True, seed=2),
    ]
    changed(made[0], "summary.json", knn=0.4321, knn_interval=[0.42, 0.446])
    comparison = compare_runs(made)
    rows = comparison.to_dict()["runs"]
    assert [row["method"] for row in rows] == ["mae", "dino", "dino"]
    assert rows[0]["knn"] == 0.4321
    assert rows[0]["interval"] == [0.42, 0.446]
    assert rows[2]["collapse"]["step"] == 600
    json.dumps(comparison.to_dict(), allow_nan=False)
    lines = format_run_comparison(comparison).split("\n")
    assert re.search(r"^mae +MAE +43\.2 % +42\.0–44\.6 ", lines[1])
    assert lines[3].endswith("collapsed at step 600")
    assert any(line.startswith("optimizer.lr") for line in lines)
    html = render_comparison(made)
    parsed(html)
    assert sections(html) == ["scores", "recipes", "curves"]
    assert "Effective rank" in charts(html)


def test_pretraining_and_supervised_runs_are_not_compared(tmp_path, capsys):
    one, other = made_run(tmp_path / "labelled", photographs=False), made_pretraining(tmp_path / "unlabelled")
    assert main(["report", str(one), str(other)]) == 2
    message = capsys.readouterr().err.strip()
    assert message.endswith(f"{other} is a pretraining run and {one} is not: compare runs of one kind")
    assert "\n" not in message


def test_json_of_a_pretraining_run(tmp_path, capsys):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    assert main(["report", str(made), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["headline"].endswith("collapsed at step 600")
    assert report["measures"]["validation"]["rank"] > 0
    assert report["collapse"]["advice"].endswith("--set objective.centre=0.9")
