"""The page of a run that learnt without labels: its signals in words, its alarm, its pictures, and what to do next."""

import json
import re

import pytest

from tests.report.made import made_run
from tests.report.made_pretraining import made_pretraining
from tests.report.test_page import HOSTILE, parsed
from vitrail.cli import main
from vitrail.report import compare, headline, write_report
from vitrail.report.compare import compare_runs
from vitrail.report.next_steps import advised, tried_again
from vitrail.report.page import page
from vitrail.report.run import read_run
from vitrail.report.side_by_side import text


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
def test_every_kind_of_run_has_a_whole_page(tmp_path, method, kinds):
    html = page(read_run(made_pretraining(tmp_path / "run", method=method, **kinds)))
    tags = parsed(html)
    assert tags.seen.count("h1") == 1
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert "in 0 classes" not in html
    assert ("results" in sections(html)) is ("labels" not in kinds and "finished" not in kinds)
    assert ("reconstructions" in sections(html)) is (method in ("mae", "mpp"))
    assert ("big.safetensors, 5,717,416 parameters" in words(html)) is (method == "features")
    assert ("Undecidedness of the teacher" in charts(html)) is (method == "dino")
    assert len(html) < 600_000


def test_write_report_gives_this_page(tmp_path):
    path = write_report(made_pretraining(tmp_path / "run"))
    html = path.read_text(encoding="utf-8")
    assert sections(html) == [
        *("results", "signals", "next", "data", "model", "speed", "environment", "chosen", "recipe")
    ]
    assert charts(html) == [
        "Right by nearest neighbours",
        "Loss",
        "Spread of the features",
        "Effective rank",
        "Undecidedness of the teacher",
        "Diversity of the teacher",
        "Learning rate",
        "Gradient norm",
        "Pictures a second",
    ]
    assert "in 10 classes, which only judging looked at" in html


def test_headline_says_what_the_features_are_worth(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.4812, knn_interval=[0.4674, 0.4951])
    said = headline(read_run(made)).replace("\u00a0", " ")
    assert said == (
        "ViT of width 192, depth 9, patch 4 pretrained with DINO on cifar-10: "
        "48.1 % right by nearest neighbours (46.7–49.5), raw pixels 33.9 %"
    )


def test_headline_without_labels_is_loss_and_rank(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", labels=(), where="/data/photos")
    changed(made, "summary.json", loss=0.6434, rank=57.3)
    assert headline(read_run(made)).endswith("pretrained with MAE on photos: loss 0.643, effective rank 57.3")


def test_unfinished_run_says_how_far_it_is(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", labels=(), finished=False)
    assert re.search(r": not finished, loss 0\.\d+, effective rank [\d.]+ after epoch 5$", headline(read_run(made)))
    assert "This run has not finished." in page(read_run(made))
    (made / "metrics.jsonl").unlink()
    assert headline(read_run(made)).endswith(": not finished, and nothing measured yet")


def test_neighbours_stand_beside_pixels_and_the_untrained_network_with_intervals(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.48, knn_interval=[0.466, 0.494], knn_pixels=0.34, knn_random=0.31, images=5000)
    said = words(page(read_run(made)))
    assert "The features are 14.0 points above raw pixels and 17.0 points above the untrained network." in said
    assert "46.6–49.4" in said
    assert "32.7–35.3" in said  # Wilson's for 1,700 of 5,000
    assert "may be chance" not in said


def test_a_difference_within_the_intervals_is_called_so(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn=0.30, knn_interval=[0.26, 0.34], knn_pixels=0.32, knn_random=0.2, images=500)
    said = words(page(read_run(made)))
    assert "2.0 points below raw pixels and 10.0 points above the untrained network." in said
    assert "The intervals overlap with that of raw pixels: it may be chance." in said


def test_collapse_is_told_with_its_cause_and_the_setting_to_change(tmp_path):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    run = read_run(made)
    assert headline(run).endswith("collapsed at step 600")
    html = page(run)
    assert "It collapsed at step 600" in html
    assert "training was stopped there" in html
    assert "<code>--set objective.centre=0.9</code>" in html
    assert "the alarm" in html
    again = f"vitrail pretrain /data/cifar-10 --method dino --set objective.centre=0.9{chr(60)}"
    assert again in html.split('id="next"')[1]
    assert "--init" not in html.split('id="next"')[1].split("</section>")[0]


def test_a_healthy_run_has_no_alarm(tmp_path):
    html = page(read_run(made_pretraining(tmp_path / "run")))
    assert "collapsed at" not in html
    assert "alarm" not in html.split("</style>")[1]


def test_reconstructions_are_grids_of_three(tmp_path):
    made = made_pretraining(tmp_path / "run", method="mae", photographs=5)
    (made / "evaluation" / "reconstructions" / "03-masked.png").write_bytes(b"no picture")
    (made / "evaluation" / "reconstructions" / "xx-masked.png").write_bytes(b"not ours")
    html = page(read_run(made)).split('id="reconstructions"')[1].split("</section>")[0]
    assert html.count('class="triple"') == 5
    assert html.count("<img") == 14
    assert html.count("not kept") == 1
    assert [html.count(f"<figcaption>{said}<") for said in ("the picture", "what it saw", "its guess")] == [5, 5, 5]


def test_next_steps_are_commands_for_this_run(tmp_path):
    with_labels = page(read_run(made_pretraining(tmp_path / "a")))
    model = tmp_path / "a" / "model.safetensors"
    for command in (
        f"vitrail train /data/cifar-10 --init {model}",
        f"vitrail evaluate {model} /data/cifar-10 --probe knn,linear",
        f"vitrail inspect {model} PICTURE.jpg --out looked",
        f"vitrail convert {model} features.safetensors --to timm",
    ):
        assert command in with_labels
    without = page(read_run(made_pretraining(tmp_path / "b", labels=())))
    assert f"vitrail train LABELLED --init {tmp_path / 'b' / 'model.safetensors'}" in without


@pytest.mark.parametrize(
    ("command", "advice", "again"),
    [
        ("pretrain d --lr 0.3 --out r", "a lower rate, --lr 0.1.", "vitrail pretrain d --lr 0.1"),
        ("pretrain d --out=r --lr=0.3", "use --lr 0.1", "vitrail pretrain d --lr 0.1"),
        ("pretrain d --set a.b=1 --set a.c=2", "--set a.b=0.5, or so", "vitrail pretrain d --set a.c=2 --set a.b=0.5"),
        ("pretrain d", "think again", ""),
    ],
)
def test_advice_becomes_a_command(command, advice, again):
    assert tried_again(["vitrail", *command.split()], advice) == again


def test_advice_is_text_and_its_options_are_code():
    assert advised("<b> use --lr 0.1.") == "&lt;b&gt; use <code>--lr 0.1</code>."


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_in_a_run_is_more_than_text(tmp_path, hostile):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    changed(made, "run.json", method=hostile, command=["vitrail", hostile])
    changed(made, "summary.json", collapse={"cause": hostile, "advice": f"--lr {hostile}", "step": 600}, method=hostile)
    tags = parsed(page(read_run(made)))
    assert tags.seen.count("script") == 1
    assert not [name for name in tags.attributes if name.startswith("on")]


def test_numbers_that_are_none_leave_holes_not_errors(tmp_path):
    made = made_pretraining(tmp_path / "run")
    changed(made, "summary.json", knn="nan", rank=None, spread="nan", knn_pixels=None, knn_interval=[1])
    with (made / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "validation", "step": 1001, "epoch": 10.01, "loss": "nan", "spread": "nan", "rank": "nan"}\n'
        )
    html = page(read_run(made))
    assert "results" not in sections(html)
    assert "nan" not in words(html.split("</style>")[1].split('id="recipe"')[0]).lower().split()


def test_pretraining_runs_stand_side_by_side(tmp_path):
    made = [
        made_pretraining(tmp_path / "mae", method="mae"),
        made_pretraining(tmp_path / "dino", lr=1e-3),
        made_pretraining(tmp_path / "fallen", collapsed=True, seed=2),
    ]
    changed(made[0], "summary.json", knn=0.4321, knn_interval=[0.42, 0.446])
    found = compare_runs(made)
    rows = found.as_dict()["runs"]
    assert [row["method"] for row in rows] == ["mae", "dino", "dino"]
    assert rows[0]["knn"] == 0.4321
    assert rows[0]["interval"] == [0.42, 0.446]
    assert rows[2]["collapse"]["step"] == 600
    json.dumps(found.as_dict(), allow_nan=False)
    lines = text(found).split("\n")
    assert re.search(r"^mae +mae +43\.2 % +42\.0–44\.6 ", lines[1])
    assert lines[3].endswith("collapsed at step 600")
    assert any(line.startswith("optimizer.lr") for line in lines)
    html = compare(made)
    parsed(html)
    assert sections(html) == ["scores", "recipes", "curves"]
    assert "Effective rank" in charts(html)


def test_runs_of_two_kinds_are_not_compared(tmp_path, capsys):
    one, other = made_run(tmp_path / "labelled", photographs=False), made_pretraining(tmp_path / "unlabelled")
    assert main(["report", str(one), str(other)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith(f"{other} learnt without labels and {one} with them: compare runs of one kind")
    assert "\n" not in said


def test_command_line_tells_the_measures_to_machines(tmp_path, capsys):
    made = made_pretraining(tmp_path / "run", collapsed=True)
    assert main(["report", str(made), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["headline"].endswith("collapsed at step 600")
    assert told["measures"]["validation"]["rank"] > 0
    assert told["collapse"]["advice"].endswith("--set objective.centre=0.9")
