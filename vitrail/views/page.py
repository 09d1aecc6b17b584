"""One page for all pictures: everything in it, nothing asked of the network, and no script but ours can run."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import vitrail
from vitrail.models.vit import ViT
from vitrail.report.markup import Markup, h, join, name
from vitrail.report.window import window
from vitrail.report.words import pictures as counted
from vitrail.views.colours import HEAT, LENGTH, LIKE, table
from vitrail.views.packed import text
from vitrail.views.worded import OF_PICTURE, Figure


@dataclass(frozen=True)
class Panel:
    """One picture on the page: what is drawn of it, the figures that lie beside the page, and those that are set on it."""

    data: dict[str, Any]
    files: Sequence[str] = ()
    figures: Mapping[str, str] = field(default_factory=dict)  # a data address by view


def page(model: str, vit: ViT, panels: Sequence[Panel], figures: Sequence[Figure]) -> str:
    """The page of a model, the pictures it looked at, and what there is to see of itself."""
    script = "\n".join(_resource("vitrail.views", name) for name in ("maps.js", "page.js"))
    style = _resource("vitrail.report", "page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = f"What {model} looks at"
    head = [
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="generator", content=f"vitrail {vitrail.__version__}"),
        h("title", title),
        h("style", Markup(style)),
        h("style", Markup(_resource("vitrail.views", "page.css"))),
    ]
    body = [
        h("a", "To the picture", href="#explore", class_="skip"),
        h("header", window(model), h("div", _opening(model, vit, panels), class_="inside")),
        h("main", _explorer(panels) if panels else None, _model(figures), class_="inside", id="main"),
        h(
            "footer",
            h(
                "p",
                f"Written by vitrail {vitrail.__version__}. The arrays behind every map are beside this page, as .npz files.",
            ),
            class_="inside",
        ),
        _data(vit, panels) if panels else None,
        h("script", Markup(script)) if panels else None,
    ]
    whole = h("html", h("head", join(head, "\n")), Markup("\n"), h("body", join(body, "\n")), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _opening(model: str, vit: ViT, panels: Sequence[Panel]) -> list[Markup]:
    size, config, count = vit.config.size, vit.config, len(panels)
    facts = [
        f"{size.depth} layers of {size.heads} heads",
        f"patches of {config.embed.stride}×{config.embed.stride} pixels",
        f"{config.image_size[1]}×{config.image_size[0]} pixels",
        *([counted(count)] if count else []),
    ]
    return [
        h("p", [h("span", fact) for fact in facts], class_="kicker"),
        h("h1", "What ", name(model), " looks at"),
        h(
            "p",
            "Point at a patch, and what each head looks at from there is drawn. Click to keep it; arrow keys move it, Escape "
            "lets it go.",
            class_="lead",
        )
        if any("between" in panel.data for panel in panels)
        else Markup(""),
    ]


def _explorer(panels: Sequence[Panel]) -> Markup:
    return h(
        "section",
        h("h2", "Explore", class_="unseen"),
        _chooser(panels) if len(panels) > 1 else None,
        h("div", _tabs(), class_="tabs", role="tablist", aria_label="What is drawn"),
        h(
            "div",
            h(
                "div",
                h(
                    "div",
                    h(
                        "canvas",
                        id="stage",
                        tabindex="0",
                        role="application",
                        aria_label="The picture with the map over it: arrow keys move the patch, Escape leaves it",
                        aria_describedby="told",
                    ),
                    class_="frame-of-stage",
                ),
                h(
                    "div",
                    h("span", "0", id="least"),
                    h("canvas", id="key", aria_hidden="true"),
                    h("span", id="most"),
                    class_="scale",
                ),
                h("p", id="told", class_="told", role="status", aria_live="polite"),
                class_="stage",
            ),
            h("div", _controls(), class_="panel", id="panel", role="tabpanel", aria_labelledby="tab-attention"),
            class_="explorer",
        ),
        [
            _of_picture(view, *words)
            for view, words in OF_PICTURE.items()
            if any(view in each.figures for each in panels)
        ],
        h("p", id="files", class_="note"),
        h(
            "noscript",
            h(
                "p",
                "This page draws with a script, which is switched off here: the PNG figures beside it show the same.",
            ),
        ),
        id="explore",
        aria_label="Explore",
    )


def _tabs() -> list[Markup]:
    names = (("attention", "Attention"), ("rollout", "Rollout"), ("relevance", "Relevance"), ("tokens", "Tokens"))
    return [
        h(
            "button",
            word,
            type="button",
            role="tab",
            id=f"tab-{key}",
            data_tab=key,
            aria_controls="panel",
            aria_selected="false",
        )
        for key, word in names
    ]


def _chooser(panels: Sequence[Panel]) -> Markup:
    choices = [
        h(
            "label",
            h("input", type="radio", name="picture", value=str(number), checked=number == 0),
            h("img", src=panel.data["thumb"], alt=""),
            h("span", name(panel.data["name"])),
        )
        for number, panel in enumerate(panels)
    ]
    return h("div", choices, class_="chooser", role="radiogroup", aria_label="Picture")


def _slider(key: str, word: str, **given: Any) -> Markup:
    return h(
        "label",
        h("span", word),
        h("input", type="range", id=key, step="1", **given),
        h("output", id=f"{key}-said", for_=key),
        class_="slider",
        data_for=key,
    )


def _controls() -> list[Markup]:
    return [
        h("p", h("b", id="said"), h("span", id="file"), class_="verdict"),
        h("p", id="reading", class_="reading"),
        h(
            "div",
            h("button", "Class token", type="button", id="whole", aria_pressed="true"),
            h("button", "A patch", type="button", id="patch", aria_pressed="false"),
            class_="switch",
            id="from",
            role="group",
            aria_label="Whose attention",
        ),
        h(
            "div",
            [
                h("button", word, type="button", data_kind=key, aria_pressed="false")
                for key, word in (("colours", "Components"), ("norms", "Length"), ("similar", "Likeness"))
            ],
            class_="switch",
            id="kinds",
            role="group",
            aria_label="What of the tokens",
        ),
        h(
            "div",
            _slider("layer", "Layer", min="1", max="1", value="1"),
            _slider("head", "Head", min="0", max="1", value="0"),
            _slider("strength", "Map", min="0", max="100", value="100"),
            class_="sliders",
        ),
        h("dl", id="odds", class_="odds", aria_label="What the model said"),
        h("div", id="heads", class_="heads", role="group", aria_label="Heads of this layer"),
        h(
            "details",
            h("summary", "All layers and heads at once"),
            h(
                "div",
                h("canvas", id="all", role="img", aria_label="A map for each head, a column for each layer"),
                class_="all",
            ),
            h(
                "p",
                "A column for each layer, a row for each head, each map by its own largest value. Click one to see it above.",
                class_="note",
            ),
            open=True,
            id="every",
        ),
        h("p", id="coarse", class_="note"),
    ]


def _of_picture(view: str, title: str, words: str) -> Markup:
    """A figure of the chosen picture; the script gives it its source."""
    return h(
        "div",
        h("h2", title),
        h("p", words),
        h("figure", h("img", alt=title), class_="paper"),
        class_="of-picture",
        data_view=view,
        hidden=True,
    )


def _model(figures: Sequence[Figure]) -> list[Markup]:
    made = []
    for each in figures:
        drawn = None
        if each.png is not None:
            source = f"data:image/png;base64,{base64.b64encode(each.png).decode('ascii')}"
            drawn = h("figure", h("img", src=source, alt=each.title), class_="paper")
        made.append(h("section", h("h2", each.title), h("p", each.words), drawn, id=each.view, aria_label=each.title))
    return made


def _data(vit: ViT, panels: Sequence[Panel]) -> Markup:
    """What the script reads: one block for all, and one for each picture, parsed when it is chosen."""
    shared = {
        "layers": vit.config.size.depth,
        "heads": vit.config.size.heads,
        "maps": {kind: text(table(kind_of)) for kind, kind_of in (("heat", HEAT), ("like", LIKE), ("length", LENGTH))},
    }
    blocks = [h("script", _json(shared), type="application/json", id="shared")]
    for number, panel in enumerate(panels):
        data = {key: value for key, value in panel.data.items() if key != "thumb"}
        data |= {"files": list(panel.files), "figures": dict(panel.figures)}
        blocks.append(h("script", _json(data), type="application/json", id=f"picture-{number}"))
    return join(blocks, "\n")


def _json(value: Any) -> Markup:
    """JSON that cannot end the element it stands in, whatever names are in it."""
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))


@cache
def _resource(package: str, file: str) -> str:
    return (files(package) / file).read_text(encoding="utf-8").strip()
