"""A run in one sentence."""

from pathlib import PurePath

from vitrail.report.run import Run
from vitrail.report.words import count, is_interval, percent, pictures, span


def data_name(run: Run) -> str:
    """What the data is called: the last part of where it lies."""
    where = run.part("data", "where")
    return (PurePath(str(where)).name or str(where)) if where else "unknown data"


def what(run: Run) -> str:
    """ "Ti/16 fine-tuned on clothing"."""
    model = run.part("model", "name") or "A model"
    how = "fine-tuned" if run.part("model", "init") else "trained from scratch"
    return f"{model} {how} on {data_name(run)}"


def headline(run: Run) -> str:
    """ "Ti/16 fine-tuned on clothing: 87.4 % of 341 pictures right (83.5–90.5)"."""
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
