"""Views of an inspection: the traces that each needs, and the figure files it produces."""

from collections.abc import Callable, Sequence

from vitrail.analysis.figures import attention, heads, tokens
from vitrail.analysis.figures.attention import draw_relevance, draw_rollout
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.figures.tokens import draw_patches

# Trace views that each image view needs.
IMAGE_VIEWS = {
    "attention": ("attention", "between", "distance"),
    "rollout": ("rollout", "relevance"),
    "tokens": ("colours", "similar", "norms"),
    "heads": ("entropy", "alike", "spectrum"),
    "patches": ("embedded", "positions"),
}
MODEL_VIEWS = ("distance", "positions", "filters")
VIEWS = ("attention", "rollout", "distance", "positions", "filters", "tokens", "heads", "patches")


def required_traces(views: Sequence[str]) -> tuple[str, ...]:
    """Return the views of `trace_image` that these views need."""
    return tuple(name for view in views for name in IMAGE_VIEWS.get(view, ()))


def plan_figures(
    view: ImageView, views: Sequence[str], layers: Sequence[int] | None = None
) -> dict[str, Callable[[], bytes]]:
    """Return a drawing function per file name for the figures of one image that its trace has data for."""
    seen, made = view.trace, {}
    if "attention" in views and seen.attention is not None:
        made["attention.png"] = lambda: attention.draw_attention(view, layers)
    if "attention" in views and seen.attention_at is not None:
        made["attention-at.png"] = lambda: attention.draw_attention(view, layers, at=True)
    if "rollout" in views and seen.rollout is not None:
        made["rollout.png"] = lambda: draw_rollout(view)
    if "rollout" in views and seen.relevance is not None:
        made["relevance.png"] = lambda: draw_relevance(view)
    if "tokens" in views and seen.norms is not None:
        made["tokens.png"] = lambda: tokens.draw_tokens(view, layers)
    if "heads" in views and seen.entropy is not None:
        made["heads.png"] = lambda: heads.draw_heads(view)
    if "patches" in views and seen.embedded is not None:
        made["patches.png"] = lambda: draw_patches(view)
    return made
