"""Made-up arrays in the shapes that analysis gives, for tests of drawing."""

import numpy as np

from vitrail.analysis.comparison import LayerProbes, ModelComparison, ModelResult
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.results import AttentionDistances, ImageTrace, ModelProfile, PositionMaps, PrincipalFilters


def rows_of_softmax(random: np.random.Generator, *shape: int) -> np.ndarray:
    odds = np.exp(2 * random.standard_normal(shape))
    return (odds / odds.sum(-1, keepdims=True)).astype(np.float32)


def made_seen(
    layers: int = 12,
    heads: int = 3,
    grid: tuple[int, int] = (14, 14),
    *,
    patch: int = 16,
    width: int = 24,
    classes: int | None = 10,
    at: tuple[int, int] | None = (3, 5),
    coarse: tuple[int, int] | None = None,
    between: bool = True,
    seed: int = 0,
) -> ImageTrace:
    """Everything there can be, at random, and one patch that is much longer than the others in later layers."""
    random = np.random.default_rng(seed)
    h, w = grid
    at = at and (min(at[0], h - 1), min(at[1], w - 1))
    a, b = coarse or grid
    rows = rows_of_softmax(random, layers, heads, a * b, a * b) if between else None
    norms = (10 + random.random((layers + 1, h, w))).astype(np.float32)
    norms[layers // 2 :, h - 1, w - 1] = 60
    alike = random.random((layers, heads, heads)).astype(np.float32)
    alike[:, range(heads), range(heads)] = 1
    frequencies = np.linspace(0, 1, 9, dtype=np.float32)
    return ImageTrace(
        grid=grid,
        patch=patch,
        prefix=1,
        reader="class token",
        logits=None if classes is None else random.standard_normal(classes).astype(np.float32),
        attention=rows_of_softmax(random, layers, heads, h * w).reshape(layers, heads, h, w),
        at=at,
        attention_at=None if at is None else rows_of_softmax(random, layers, heads, h * w).reshape(layers, heads, h, w),
        between=None if rows is None else rows.astype(np.float16),
        between_grid=None if rows is None else (a, b),
        distance=random.uniform(10, 120, (layers, heads)).astype(np.float32),
        entropy=random.uniform(2, 5, (layers, heads)).astype(np.float32),
        alike=alike,
        rollout=random.random((h, w)).astype(np.float32),
        relevance=None if classes is None else random.random((h, w)).astype(np.float32),
        target=None if classes is None else 3,
        colours=random.random((layers + 1, h, w, 3)).astype(np.float32),
        similar=None if at is None else random.uniform(-1, 1, (layers + 1, h, w)).astype(np.float32),
        norms=norms,
        prefix_norms=random.uniform(5, 40, (layers + 1, 1)).astype(np.float32),
        spectrum=(-3 * frequencies[None] * random.random((layers + 1, 1))).astype(np.float32),
        frequencies=frequencies,
        embedded=random.standard_normal((h, w, width)).astype(np.float32),
        positions=random.standard_normal((h, w, width)).astype(np.float32),
    )


def made_shown(name: str = "made.png", seed: int = 0, **given) -> ImageView:
    seen = made_seen(seed=seed, **given)
    h, w = seen.grid
    down, across = np.mgrid[0 : h * seen.patch, 0 : w * seen.patch]
    pixels = np.stack([down % 256, across % 256, (down + across) % 256], -1).astype(np.uint8)
    return ImageView(name, pixels, seen, tuple(f"kind {k}" for k in range(10)), "a made-up model")


def made_distances(layers: int = 12, heads: int = 3) -> AttentionDistances:
    random = np.random.default_rng(0)
    mean = (np.linspace(30, 110, layers)[:, None] + random.uniform(-20, 20, (layers, heads))).astype(np.float32)
    return AttentionDistances(mean, np.full_like(mean, 4), 8, (224, 224))


def made_positions(
    kind: str = "added", grid: tuple[int, int] = (14, 14), heads: int = 3, tables: int = 12
) -> PositionMaps:
    h, w = grid
    rows, columns = np.mgrid[0:h, 0:w]
    down = rows[:, :, None, None] - rows[None, None]
    across = columns[:, :, None, None] - columns[None, None]
    offsets = np.mgrid[1 - h : h, 1 - w : w].astype(np.float32)
    if kind == "added":
        return PositionMaps(kind, grid, similarity=np.exp(-(down**2 + across**2) / 20).astype(np.float32))
    if kind == "bias":
        bias = np.sin(offsets[0] / 3) * np.cos(offsets[1] / 4)
        return PositionMaps(kind, grid, bias=np.broadcast_to(bias, (tables, heads, *bias.shape)).astype(np.float32))
    if kind == "rotary":
        return PositionMaps(
            kind, grid, turn=(np.cos(offsets[0] / 3) / 2 + np.cos(offsets[1] / 3) / 2).astype(np.float32)
        )
    return PositionMaps("none", grid)


def made_filters(count: int = 28, patch: int = 16, channels: int = 3) -> PrincipalFilters:
    random = np.random.default_rng(0)
    explained = np.exp(-np.arange(count) / 4)
    return PrincipalFilters(
        random.uniform(-1, 1, (count, patch, patch, channels)).astype(np.float32),
        (explained / explained.sum() * 0.9).astype(np.float32),
        "patch projection",
    )


def made_side(
    letter: str, name: str, depth: int, heads: int, size: tuple[int, int], seed: int, probe: bool = True
) -> ModelResult:
    random = np.random.default_rng(seed)
    deep, frequencies = np.linspace(0, 1, depth)[:, None], np.linspace(0, 1, 8)
    distance = 30 + 70 * deep + random.uniform(-25, 25, (depth, heads))
    diversity = 0.5 - 0.3 * deep * seed + random.uniform(-0.1, 0.1, (depth, heads))
    spectrum = -(1.2 + 1.3 * np.linspace(0, 1, depth + 1))[:, None] * frequencies * (1 + 0.3 * seed)
    found = ModelProfile(
        distance=distance,
        distance_spread=distance / 10,
        diversity=diversity if heads > 1 else np.full_like(diversity, np.nan),
        diversity_spread=np.zeros_like(distance),
        mutual=0.3 - 0.2 * deep * seed + random.uniform(-0.05, 0.05, (depth, heads)),
        mutual_spread=np.zeros_like(distance),
        spectrum=spectrum,
        spectrum_spread=abs(spectrum) / 12,
        frequencies=frequencies,
        everywhere=116.0,
        grid=(14, 14),
        size=size,
        pictures=48,
    )
    right = tuple(int(k) for k in np.linspace(30, 90 - 10 * seed, depth + 1))
    return ModelResult(
        letter, name, found, LayerProbes(right, (0.01,) * (depth + 1), 100, 120, 10, 0.12) if probe else None
    )


def made_comparison(
    depths: tuple[int, int] = (12, 12),
    heads: tuple[int, int] = (3, 3),
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((224, 224), (224, 224)),
    names: tuple[str, str] = ("mae", "dino with a name that is long enough to be shortened somewhere"),
    probe: bool = True,
) -> ModelComparison:
    sides = [made_side("AB"[k], names[k], depths[k], heads[k], sizes[k], k, probe) for k in (0, 1)]
    return ModelComparison((sides[0], sides[1]), "photos", "" if probe else "no labels")
