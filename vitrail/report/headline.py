"""A run in one sentence."""

from pathlib import PurePath

from vitrail.report.run import Run
from vitrail.report.words import count, is_interval, is_number, number, percent, pictures, span

METHODS = {"mpp": "masked patches", "mae": "MAE", "dino": "DINO", "features": "a teacher’s features"}


def data_name(run: Run) -> str:
    """What the data is called: the last part of where it lies."""
    where = run.part("data", "where")
    return (PurePath(str(where)).name or str(where)) if where else "unknown data"


def what(run: Run) -> str:
    """ "Ti/16 fine-tuned on clothing"."""
    model = run.part("model", "name") or "A model"
    if run.pretraining:
        with_method = f" with {METHODS.get(run.method, run.method)}" if run.method else ""
        return f"{model} pretrained{with_method} on {data_name(run)}"
    how = "fine-tuned" if run.part("model", "init") else "trained from scratch"
    return f"{model} {how} on {data_name(run)}"


def headline(run: Run) -> str:
    """ "Ti/16 fine-tuned on clothing: 87.4 % of 341 pictures right (83.5–90.5)"."""
    if run.pretraining:
        return f"{what(run)}: {learnt(run)}"
    if run.finished or run.evaluation:
        result = result_in_words(run)
        return f"{what(run)}: {result}" if result else what(run)
    seen = [row for row in run.validation if row.get(run.score_name) is not None]
    if not seen:
        return f"{what(run)}: not finished, and nothing measured yet"
    last = seen[-1]
    score = f"mAP {percent(last['map'])}" if run.several else f"{percent(last['top1'])} right"
    return f"{what(run)}: not finished, {score} after epoch {count(last.get('epoch'))}"


def result_in_words(run: Run) -> str:
    """ "87.4 % of 341 pictures right (83.5–90.5)", or nothing where there is no score."""
    measured = run.measured(run.split or "")
    score = measured.get(run.score_name)
    if score is None:
        return ""
    images = measured.get("images")
    within = f" ({span(measured['interval'])})" if is_interval(measured.get("interval")) else ""
    if run.several:
        return f"mAP {percent(score)}" + (f" on {pictures(images)}" if images else "") + within
    return f"{percent(score)}" + (f" of {pictures(images)}" if images else "") + " right" + within


def learnt(run: Run) -> str:
    """Of a run without labels: "46.2 % right by nearest neighbours (44.8–47.6), raw pixels 35.0 %"."""
    if run.collapse:
        return f"collapsed at step {count(run.collapse.get('step'))}"
    last = run.summary or (run.validation[-1] if run.validation else {})
    when = "" if run.finished else "not finished, "
    after = "" if run.finished or not last else f" after epoch {last.get('epoch', 0):g}"
    if is_number(last.get("knn")):
        within = f" ({span(last['knn_interval'])})" if is_interval(last.get("knn_interval")) else ""
        pixels = f", raw pixels {percent(last['knn_pixels'])}" if is_number(last.get("knn_pixels")) else ""
        return f"{when}{percent(last['knn'])} right by nearest neighbours{within}{pixels}{after}"
    told = [f"loss {number(last['loss'])}"] if is_number(last.get("loss")) else []
    told += [f"effective rank {number(last['rank'])}"] if is_number(last.get("rank")) else []
    if not told:
        return "nothing was measured" if run.finished else "not finished, and nothing measured yet"
    return f"{when}{', '.join(told)}{after}"
