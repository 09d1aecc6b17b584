"""Which views there are, what each needs to be looked at, and the files it becomes."""

from collections.abc import Callable, Sequence

from vitrail.views import attention, explained, heads, patches, tokens
from vitrail.views.shown import Shown

# Of each picture: what analysis must look at for it.
OF_PICTURES = {
    "attention": ("attention", "between", "distance"),
    "rollout": ("rollout", "relevance"),
    "tokens": ("colours", "similar", "norms"),
    "heads": ("entropy", "alike", "spectrum"),
    "patches": ("embedded", "positions"),
}
OF_MODELS = ("distance", "positions", "filters")
VIEWS = ("attention", "rollout", "distance", "positions", "filters", "tokens", "heads", "patches")


def wanted(views: Sequence[str]) -> tuple[str, ...]:
    """What `vitrail.analysis.look` is asked for, for these views."""
    return tuple(name for view in views for name in OF_PICTURES.get(view, ()))


def figures(shown: Shown, views: Sequence[str], layers: Sequence[int] | None = None) -> dict[str, Callable[[], bytes]]:
    """The figures of one picture by file name, each drawn when it is called: what there is nothing for is left out."""
    seen, made = shown.seen, {}
    if "attention" in views and seen.attention is not None:
        made["attention.png"] = lambda: attention.draw(shown, layers)
    if "attention" in views and seen.attention_at is not None:
        made["attention-at.png"] = lambda: attention.draw(shown, layers, at=True)
    if "rollout" in views and seen.rollout is not None:
        made["rollout.png"] = lambda: explained.draw_rollout(shown)
    if "rollout" in views and seen.relevance is not None:
        made["relevance.png"] = lambda: explained.draw_relevance(shown)
    if "tokens" in views and seen.norms is not None:
        made["tokens.png"] = lambda: tokens.draw(shown, layers)
    if "heads" in views and seen.entropy is not None:
        made["heads.png"] = lambda: heads.draw(shown)
    if "patches" in views and seen.embedded is not None:
        made["patches.png"] = lambda: patches.draw(shown)
    return made
