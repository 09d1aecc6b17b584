"""Titles and captions of the figures on the page."""

from dataclasses import dataclass

from vitrail.analysis.results import PositionMaps, PrincipalFilters
from vitrail.nn.position import FixedPositionEmbedding, Learned2DTable, PositionEmbedding

# Title and caption of the figures of one image that are embedded in the page.
IMAGE_CAPTIONS = {
    "heads": (
        "Differences between heads",
        "Entropy of the attention of each head, spectrum of the token maps of each layer, and similarity of the heads of a "
        "layer: 1 if two attend to the same tokens.",
    ),
    "patches": (
        "Patch embedding",
        "Equation 1 of the paper: the image is cut into patches, each is projected to a token, and position embeddings are "
        "added. Tokens are drawn by their first three principal components.",
    ),
}
POSITION_MAP_NOTE = "Each small map is one position: the cosine similarity of its embedding with all others. "


@dataclass(frozen=True)
class ModelFigure:
    """Figure of the model itself; without a PNG there is only the caption."""

    view: str
    title: str
    caption: str
    png: bytes | None


def make_distance_figure(png: bytes) -> ModelFigure:
    """Return figure 7 (right)."""
    caption = (
        "Each dot is a head: the mean distance in pixels between a query patch and the patches it attends to. Low dots are "
        "local, like convolutions; high dots are global. Trained models have both kinds in the first layers and mostly "
        "global heads in later ones. Figure 7 (right) of the paper."
    )
    return ModelFigure("distance", "Mean attention distance", caption, png)


def make_positions_figure(positions: PositionMaps, position: PositionEmbedding, png: bytes | None) -> ModelFigure:
    """Return figure 7 (centre), or its equivalent for other position embeddings."""
    return ModelFigure("positions", "Position embedding", _caption_positions(positions, position), png)


def _caption_positions(maps: PositionMaps, position: PositionEmbedding) -> str:
    match maps.kind:
        case "added" if isinstance(position, FixedPositionEmbedding):
            return f"{POSITION_MAP_NOTE}The embeddings are fixed sines and cosines, not learned."
        case "added" if isinstance(position, Learned2DTable):
            return (
                f"{POSITION_MAP_NOTE}The embeddings are learned, one vector per row and one per column: the row and column of "
                "a patch are given, the similarity of rows and of columns is learned."
            )
        case "added":
            return (
                f"{POSITION_MAP_NOTE}The embeddings are learned without information on the grid: similarity of neighbours, "
                "rows and columns is learned from the data. Figure 7 (centre) of the paper."
            )
        case "bias":
            return (
                "Each small map is the learned bias that one head adds to its attention scores, by offset in rows and columns; "
                "the centre is the patch itself. Violet increases attention, orange decreases it."
            )
        case "rotary":
            return (
                "Queries and keys are rotated by the position of their patch (RoPE). The map is the mean cosine between the "
                "rotations of two patches, by offset in rows and columns; it is fixed, not learned."
            )
    return "The model has no position embedding: its attention sees the patches as a set."


def make_filters_figure(filters: PrincipalFilters, png: bytes) -> ModelFigure:
    """Return figure 7 (left)."""
    if filters.source == "patch projection":
        caption = (
            "Principal components of the filters that project the pixels of a patch to a token, the largest first. In trained "
            "models they resemble basis functions: blobs, edges and waves of many directions. Figure 7 (left) of the paper."
        )
    else:
        height, width = filters.tiles.shape[1:3]
        caption = (
            f"Principal components of the filters of the {filters.source}, {height}×{width} pixels, the largest first. More "
            "layers follow before the tokens, so a filter is smaller than a patch; figure 7 (left) of the paper shows those "
            "of a patch projection."
        )
    return ModelFigure("filters", "Patch embedding filters", caption, png)
