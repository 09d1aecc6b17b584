"""The contact sheet: one self-contained HTML page on which a person decides about labels, and saves the decisions as CSV.

The page works from a disk without a network. Decisions are kept by the browser until they are saved.
"""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.decode import IMAGE_ERRORS
from vitrail.data.sources.files import printable_path
from vitrail.deploy.search.contact_sheet import make_thumbnail
from vitrail.labelling.next_images import ImagesToLabel
from vitrail.labelling.suspects import LabelErrors
from vitrail.reports.document import (
    read_resource,
    render_footer,
    render_heading,
    render_window,
    wrap_document,
    write_html,
)
from vitrail.reports.html import Markup, h, isolate
from vitrail.utils.progress import ProgressCallback
from vitrail.utils.text import format_image_count, format_percent

THUMBNAIL = 288  # longer side, in pixels
MAX_CARDS = 500  # of a page: about 10 MB
ACTIONS = {  # decision: letter and what its button says
    "accept": ("A", "Accept"),
    "correct": ("C", "Correct"),
    "dismiss": ("D", "Keep"),
    "remove": ("X", "Remove"),
}


@dataclass(frozen=True)
class SheetCard:
    """An image on the sheet."""

    path: str
    given: str  # empty without a label
    suggested: str
    shown: str  # path on the card
    measures: tuple[tuple[str, float, str], ...]  # name, value from 0 to 1, and as text


@dataclass(frozen=True)
class Sheet:
    """The contents of a contact sheet."""

    title: str
    kicker: tuple[str, ...]
    lead: str
    tiles: tuple[tuple[str, str, str], ...]  # what, value, explanation
    classes: tuple[str, ...]
    cards: tuple[SheetCard, ...]
    file: str  # name of the CSV that the page saves
    notes: tuple[str, ...] = ()


def build_suspect_sheet(errors: LabelErrors, name: str, limit: int = MAX_CARDS) -> Sheet:
    """Return the sheet of suspected labels, the most suspicious first."""
    count, share = len(errors.suspects), format_percent(errors.noise_rate)
    shown = errors.suspects[:limit]
    cut = (f"The page has the first {len(shown):,} of {count:,} suspects; the table has all.",) if count > limit else ()
    return Sheet(
        title=f"{count:,} suspect label{'s' * (count != 1)} of {errors.n_labels:,}",
        kicker=("label errors", errors.model, name_data(errors.data)),
        lead="Accept the suggestion, correct it with another class, keep the given label, or remove the image. "
        "Then save the decisions, and apply them with vitrail label apply.",
        tiles=(
            ("suspected", f"{count:,}", f"{format_percent(count / errors.n_labels)} of {errors.n_labels:,} labels"),
            ("estimated wrong labels", share, "confident learning, all classes"),
        ),
        classes=errors.classes,
        cards=tuple(
            SheetCard(
                absolute_path(suspect.path),
                suspect.given_label,
                suspect.suggested_label,
                shorten_path(suspect.path),
                (
                    ("suspicion", suspect.score, f"{suspect.score:.2f}"),
                    ("classifier", suspect.classifier_confidence, format_percent(suspect.classifier_confidence, 0)),
                    ("neighbours", suspect.neighbour_agreement, format_percent(suspect.neighbour_agreement, 0)),
                ),
            )
            for suspect in shown
        ),
        file=name,
        notes=(
            "Suspicion, score in the table, is the mean of 1 - self-confidence and (1 - margin) / 2, from the mean of "
            "classifier and neighbours. "
            "Classifier and neighbours are the probability and the share of votes of the given label.",
            *cut,
        ),
    )


def build_next_sheet(chosen: ImagesToLabel, name: str, limit: int = MAX_CARDS) -> Sheet:
    """Return the sheet of images to label, the most useful first."""
    count = len(chosen.images)
    return Sheet(
        title=f"{format_image_count(count)} to label next",
        kicker=("labels", chosen.model, name_data(chosen.unlabelled)),
        lead="Accept the suggestion, correct it with another class, or remove the image. Then save the decisions, and add "
        "them to the labels with vitrail label apply.",
        tiles=(
            ("to label", f"{count:,}", f"of {chosen.n_unlabelled:,} unlabelled images"),
            ("labelled already", f"{chosen.n_labelled:,}", f"{len(chosen.classes)} classes"),
        ),
        classes=chosen.classes,
        cards=tuple(
            SheetCard(
                absolute_path(image.path),
                "",
                image.suggested_label,
                shorten_path(image.path),
                (
                    (image.suggested_label, image.confidence, format_percent(image.confidence, 0)),
                    (
                        image.second_label,
                        image.confidence - image.margin,
                        format_percent(image.confidence - image.margin, 0),
                    ),
                ),
            )
            for image in chosen.images[:limit]
        ),
        file=name,
        notes=("The bars are the probabilities of the two most probable classes.",),
    )


def absolute_path(path: str) -> str:
    """Return the absolute path, which a saved file needs wherever a browser puts it."""
    return str(Path(path).absolute())


def name_data(source: str) -> str:
    """Return the last part of a source."""
    return printable_path(Path(source).name or source)


def shorten_path(path: str) -> str:
    """Return the file with its folder."""
    return "/".join(Path(path).parts[-2:])


def write_sheet(sheet: Sheet, path: Path, progress: ProgressCallback | None = None) -> None:
    """Write the page atomically."""
    write_html(render_sheet(sheet, progress), path)


def render_sheet(sheet: Sheet, progress: ProgressCallback | None = None) -> str:
    """Return the HTML of a sheet."""
    identity = hashlib.sha256("\n".join([sheet.title, *(card.path for card in sheet.cards)]).encode("utf-8", "replace"))
    cards = []
    for number, card in enumerate(sheet.cards):
        cards.append(render_card(number, card))
        if progress:
            progress("drawing the contact sheet", number + 1, len(sheet.cards))
    heading = [
        *render_heading(sheet.kicker, sheet.title, sheet.lead),
        h("div", [render_tile(*tile) for tile in sheet.tiles], render_progress_tile(len(cards)), class_="tiles"),
    ]
    script = read_resource("vitrail.labelling", "sheet.js")
    labelled = any(card.given for card in sheet.cards)
    attributes = {
        "data_id": identity.hexdigest()[:16],
        "data_file": sheet.file,
        "data_labelled": labelled,
    }
    body = [
        h("a", "To the images", href="#main", class_="skip"),
        h("header", render_window(identity.hexdigest()), h("div", heading, class_="inside")),
        render_toolbar(labelled),
        h(
            "main",
            [h("p", note, class_="note") for note in sheet.notes],
            h("div", cards, class_="cards deck"),
            id="main",
            class_="inside",
            **attributes,
        ),
        h("datalist", [h("option", value=name) for name in sheet.classes], id="classes"),
        render_footer("Decisions stay in this browser until you save them; no image leaves this computer."),
        h("script", Markup(script)),
    ]
    return wrap_document(sheet.title, body, script, [read_resource("vitrail.labelling", "sheet.css")])


def render_tile(what: str, value: str, under: str) -> Markup:
    """Return a tile of the heading."""
    parts = (("what", what), ("value", value), ("under", under))
    return h("div", [h("p", text, class_=name) for name, text in parts], class_="tile")


def render_progress_tile(count: int) -> Markup:
    """Return the tile that counts decisions."""
    value = h("p", h("span", "0", id="decided"), f" / {count:,}", class_="value")
    bar = h("span", h("span", class_="fill c3", id="progress", style="width: 0"), class_="bar")
    status = h("p", id="status", role="status", class_="under")
    return h("div", h("p", "decided", class_="what"), value, bar, status, class_="tile")


def render_toolbar(labelled: bool) -> Markup:
    """Return the bar with filters, keys and the button that saves."""
    filters = {"all": "All", "undecided": "Undecided", "decided": "Decided"}
    buttons = [
        h("button", text, type="button", data_filter=key, aria_pressed="true" if key == "all" else "false")
        for key, text in filters.items()
    ]
    letters = [(letter, text) for key, (letter, text) in ACTIONS.items() if labelled or key != "dismiss"]
    keys = [
        h("span", h("kbd", letter), f" {text.lower()}") for letter, text in [*letters, ("U", "Undo"), ("← →", "Move")]
    ]
    save = h("button", "Save decisions", type="button", id="save", disabled=True)
    inner = [h("div", buttons, class_="filters", role="group", aria_label="Shown images"), h("p", keys, class_="keys")]
    return h("div", h("div", inner, save, class_="inside"), class_="toolbar", role="toolbar", aria_label="Decisions")


def render_card(number: int, card: SheetCard) -> Markup:
    """Return the card of an image."""
    name = Path(card.path).name
    labels: list[Markup | str | None] = [isolate(card.suggested, class_="to")]
    if card.given:
        labels = [isolate(card.given, class_="from"), h("span", "→", class_="arrow", aria_label="suggested"), *labels]
    rows = [
        h(
            "li",
            h("span", what),
            h("span", h("span", class_=f"fill c{1 + (place > 0)}", style=f"width: {100 * value:.1f}%"), class_="bar"),
            h("b", text),
        )
        for place, (what, value, text) in enumerate(card.measures)
    ]
    actions = [
        h("button", text, type="button", data_action=key, title=f"{text} ({letter})", aria_pressed="false")
        for key, (letter, text) in ACTIONS.items()
        if card.given or key != "dismiss"
    ]
    field = h(
        "input",
        type="text",
        list="classes",
        class_="other",
        aria_label=f"Class of {name}",
        placeholder="class",
        hidden=True,
    )
    caption = h(
        "figcaption",
        h("p", labels, class_="change"),
        h("ul", rows, class_="measures"),
        h("p", isolate(card.shown), class_="file"),
        field,
        h("div", actions, class_="actions", role="group", aria_label=f"Decision about {name}"),
    )
    frame = h("div", embed_thumbnail(Path(card.path)), h("span", class_="stamp", aria_live="polite"), class_="frame")
    values = {"data_path": card.path, "data_given": card.given, "data_suggested": card.suggested}
    return h("figure", frame, caption, class_="card", tabindex="0" if not number else "-1", **values)


def embed_thumbnail(path: Path) -> Markup:
    """Return an embedded thumbnail, or the reason why there is none."""
    try:
        data, kind, pixelated = make_thumbnail(path, THUMBNAIL)
    except IMAGE_ERRORS as error:
        return h("span", "unreadable" if path.exists() else "file missing", class_="lacking", title=f"{error}")
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return h(
        "img", src=source, alt=printable_path(path.name), loading="lazy", class_="few-pixels" if pixelated else None
    )
