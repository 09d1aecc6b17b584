"""The window at the top of a page: leaded glass, drawn from the recipe. The same recipe has the same window."""

import random
import zlib

from vitrail.report.markup import Markup, h

COLUMNS, ROWS = 22, 3
WIDTH, HEIGHT = 1320, 132
WEIGHTS = (5, 5, 4, 1.5, 2, 1.5, 3, 0.8)  # blues and ruby, as in Chartres; little of the light ones


def window(seed: str) -> Markup:
    """Panes of uneven shape in a few colours, no two neighbours alike where it can be helped."""
    chance = random.Random(zlib.crc32(seed.encode("utf-8", "backslashreplace")))
    wide, high = WIDTH / COLUMNS, HEIGHT / ROWS

    def corner(column: int, row: int) -> tuple[float, float]:
        aside = 0 if column in (0, COLUMNS) else chance.uniform(-0.34, 0.34)
        down = 0 if row in (0, ROWS) else chance.uniform(-0.3, 0.3)
        return (column + aside) * wide, (row + down) * high

    corners = [[corner(column, row) for row in range(ROWS + 1)] for column in range(COLUMNS + 1)]
    panes, colours = [], {}
    for column in range(COLUMNS):
        for row in range(ROWS):
            a, b = corners[column][row], corners[column + 1][row]
            c, d = corners[column + 1][row + 1], corners[column][row + 1]
            shapes = [(a, b, c, d)]
            if chance.random() < 0.3:
                shapes = [(a, b, c), (a, c, d)] if chance.random() < 0.5 else [(a, b, d), (b, c, d)]
            for shape in shapes:
                near = {colours.get((column - 1, row)), colours.get((column, row - 1)), colours.get((column, row))}
                free = [k for k in range(len(WEIGHTS)) if k not in near]
                colour = chance.choices(free, [WEIGHTS[k] for k in free])[0]
                colours[column, row] = colour
                points = " ".join(f"{x:.0f},{y:.0f}" for x, y in shape)
                panes.append(h("polygon", points=points, class_=f"g{colour}"))
    return h(
        "svg",
        panes,
        class_="window",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="xMidYMid slice",
        aria_hidden="true",
    )
