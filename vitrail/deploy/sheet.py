"""A contact sheet: a picture, and under it those nearest to it, as one page that needs nothing else."""

import base64
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from vitrail.data.decode import UNREADABLE
from vitrail.data.opening import named, opened
from vitrail.data.preprocessing import plain
from vitrail.data.sources.files import printable
from vitrail.deploy.search_index import Index
from vitrail.deploy.searching import Answer, Neighbour
from vitrail.report.charts import bar
from vitrail.report.markup import Markup, h, join, name
from vitrail.report.page import Part, document, write_page
from vitrail.report.words import pictures as so_many

LARGE, SMALL = 720, 320  # pixels of the longer side
FEW_PIXELS = 48  # wide or high: enlarged, such a picture shows its pixels
PAPER = (255, 255, 255)  # behind what is transparent


def write_sheet(index: Index, answers: list[Answer], how: str, path: Path) -> None:
    """The sheet on the disk, whole or not at all."""
    write_page(sheet(index, answers, how), path)


def sheet(index: Index, answers: list[Answer], how: str) -> str:
    """The page: one picture with its neighbours, or several, each with its own."""
    first = answers[0].query.name
    several = len(answers) > 1
    title = f"Nearest to {len(answers)} pictures" if several else f"Nearest to {printable(first)}"
    kicker = ("search", index.model.name, printable(index.folder.name))
    lead = f"Of {so_many(len(index.pictures))}, those that {index.model.name} sees as most alike, compared by cosine {how}."
    words = [
        h("p", [h("span", name(text)) for text in kicker], class_="kicker"),
        h("h1", "Nearest to ", f"{len(answers)} pictures" if several else name(printable(first))),
        h("p", lead, class_="lead"),
    ]
    top = words if several else [h("div", h("div", words), asked(answers[0]), class_="beside-it")]
    parts: list[Part] = [
        (
            f"query-{place}",
            printable(answer.query.name),
            f"Nearest to {printable(answer.query.name)}" if several else "The nearest pictures",
            [
                asked(answer) if several else None,
                h("div", [card(rank, each) for rank, each in enumerate(answer.neighbours, 1)], class_="cards near"),
            ],
        )
        for place, answer in enumerate(answers, 1)
    ]
    style = (files("vitrail.deploy") / "sheet.css").read_text(encoding="utf-8").strip()
    alone = "" if several else "\nnav { display: none; }"  # one part needs no list of parts
    return document(title, index.model.checksum + first, top, parts, "the model and the picture", style + alone)


def asked(answer: Answer) -> Markup:
    """The picture that was asked for."""
    return h("div", shown(answer.query, LARGE, True), class_="asked")


def card(rank: int, near: Neighbour) -> Markup:
    """A neighbour, with how near it is and where it lies."""
    folder, _, file = near.shown.rpartition("/")
    return h(
        "figure",
        h("div", shown(near.path, SMALL), class_="frame"),
        h(
            "figcaption",
            h("p", h("span", f"{rank}"), bar(near.cosine), h("b", f"{near.cosine:.3f}"), class_="nearness"),
            h("p", join([name(folder), " / "]) if folder else None, h("b", name(file)), class_="file"),
        ),
        class_="card",
    )


def shown(path: Path, size: int, large: bool = False) -> Markup:
    """A picture inside the page, upright and no larger than it is looked at; or why there is none."""
    label = printable(path.name)
    try:
        data, kind, few = thumbnail(path, size)
    except UNREADABLE as error:
        gone = not path.exists()
        return h("span", "no longer there" if gone else "cannot be read", class_="lacking", title=f"{error}")
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    alt = f"The picture {label}" if large else label
    return h("img", src=source, alt=alt, class_="few-pixels" if few else None)


def thumbnail(path: Path, size: int) -> tuple[bytes, str, bool]:
    """A small copy in memory, its kind, and whether it has few pixels."""
    label = printable(str(path))
    with named(label), opened(str(path), label) as image:
        image.draft(None, (size, size))
        upright = plain(ImageOps.exif_transpose(image), 4)
        paper = Image.new("RGBA", upright.size, (*PAPER, 255))
        flat = Image.alpha_composite(paper, upright).convert("RGB")
        flat.thumbnail((size, size), Image.Resampling.LANCZOS)
        few, kept = max(flat.size) <= FEW_PIXELS, BytesIO()
        if few:
            flat.save(kept, "PNG")
        else:
            flat.save(kept, "JPEG", quality=84)
    return kept.getvalue(), "png" if few else "jpeg", few
