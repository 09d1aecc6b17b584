"""What figures on the page are called and what they say, for the model at hand."""

from dataclasses import dataclass

from vitrail.analysis.seen import Filters, Positions
from vitrail.nn.position import Fixed, Learned2DTable, Position

# Figures of one picture that are set on the page as they are: their title and words.
OF_PICTURE = {
    "heads": (
        "How the heads differ",
        "How widely each head looks (its entropy), which frequencies of the token maps each layer keeps, and how alike the "
        "heads of a layer are: 1 where two look at the same.",
    ),
    "patches": (
        "How the picture comes in",
        "Equation 1 of the paper: the picture cut into patches, each made a token and told where it is. Tokens are drawn by "
        "their first three principal components.",
    ),
}
EACH = "Each small map is one position: how alike its embedding is to that of every other. "


@dataclass(frozen=True)
class Figure:
    """A figure of the model itself; without a PNG its words are all there is to say."""

    view: str
    title: str
    words: str
    png: bytes | None


def of_distance(png: bytes) -> Figure:
    """Figure 7 (right)."""
    words = (
        "Each dot is a head: the mean distance, in pixels, between a patch and what it looks at. Low dots look nearby, as "
        "convolutions do; high ones across the picture. In trained models both kinds live in the first layers, and later "
        "layers look far. Figure 7 (right) of the paper."
    )
    return Figure("distance", "How far attention reaches", words, png)


def of_positions(found: Positions, position: Position, png: bytes | None) -> Figure:
    """Figure 7 (centre), or its kin for other kinds of positions."""
    return Figure("positions", "How it tells where a patch is", _of_positions(found, position), png)


def _of_positions(found: Positions, position: Position) -> str:
    match found.kind:
        case "added" if isinstance(position, Fixed):
            return f"{EACH}They are fixed sines and cosines: what is seen here was built in, and not learnt."
        case "added" if isinstance(position, Learned2DTable):
            return (
                f"{EACH}They are learnt, one vector for the row beside one for the column: the model was told which patches "
                "share a row or a column, and learnt how rows and columns are to each other."
            )
        case "added":
            return (
                f"{EACH}They are learnt, and nobody told the model that patches lie in a grid: where neighbours, rows and "
                "columns are alike, it found that out. Figure 7 (centre) of the paper."
            )
        case "bias":
            return (
                "Each small map is what one head adds to its attention, by how many rows and columns a patch lies away; the "
                "middle is the patch itself. It is learnt: violet is looked at more, orange less."
            )
        case "rotary":
            return (
                "Queries and keys are turned by the place of their patch. The map is how much the turns of two patches agree, "
                "by how many rows and columns they lie apart; it is built in, and not learnt."
            )
    return "It does not: the model has no positions, and its attention sees patches as a set."


def of_filters(found: Filters, png: bytes) -> Figure:
    """Figure 7 (left)."""
    if found.source == "patch projection":
        words = (
            "The principal components of the filters that turn the pixels of a patch into a token, the largest first. In "
            "trained models they are spots and edges of colour and waves of many directions: a basis for what is in a "
            "patch. Figure 7 (left) of the paper."
        )
    else:
        height, width = found.tiles.shape[1:3]
        words = (
            f"The principal components of the filters of the {found.source}, {height}×{width} pixels, the largest first. "
            "More layers follow before there are tokens, so that a filter here is smaller than a patch; figure 7 (left) of "
            "the paper shows the same of a patch projection."
        )
    return Figure("filters", "What it sees first", words, png)
