"""What can be wrong with data: every kind with how grave it is, what it is called, and what to do."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # the gravest first


@dataclass(frozen=True)
class Kind:
    """A way to be wrong."""

    severity: Severity
    title: str
    remedy: str


KINDS = {
    "zero-byte": Kind("error", "files of zero bytes", "fetch them again or delete them; training skips them"),
    "truncated": Kind("error", "pictures that end too soon", "fetch them again or delete them; training skips them"),
    "unreadable": Kind("error", "pictures that cannot be read", "fetch them again or delete them; training skips them"),
    "not-an-image": Kind(
        "error", "other files named as pictures", "look what was downloaded in their place; training skips them"
    ),
    "bomb": Kind("error", "too large to decode safely", "make them smaller; training skips them"),
    "empty-class": Kind("error", "classes without a picture", "add pictures, or remove the folder"),
    "classes-differ": Kind("error", "classes that differ between splits", "give every split the same classes"),
    "tool-folder": Kind("error", "folders of tools taken as classes", "move them out of the data"),
    "contradiction": Kind(
        "error", "one picture, different labels", "decide what it shows, and delete the other copies"
    ),
    "leak": Kind("error", "the same picture in two splits", "delete the copy to train on; --quarantine lists it"),
    "near-leak": Kind("warning", "nearly the same in two splits", "look at both; results on the held-out copy flatter"),
    "near-contradiction": Kind("warning", "nearly the same, other label", "look at both: one label may be wrong"),
    "duplicate": Kind("warning", "copies inside a split", "keep one: copies count twice in training and results"),
    "large": Kind("warning", "enormous pictures", "make them smaller: each takes hundreds of megabytes to decode"),
    "tiny": Kind("warning", "tiny pictures", "delete thumbnails and tracking pixels"),
    "thin-class": Kind(
        "warning", "classes too small to be split", "add pictures: one cannot be both trained and tested"
    ),
    "outside": Kind(
        "warning", "pictures that are not taken", "move them into a folder of their class, or convert them"
    ),
    "imbalance": Kind("warning", "some classes far larger", "balance the sampling or weigh the classes"),
    "near-duplicate": Kind("note", "nearly the same inside a split", "keep the better one, if both are one photograph"),
    "wrong-suffix": Kind("note", "named as another format", "harmless: the content decides; rename to be clean"),
    "mode": Kind("note", "unusual kinds of pixels", "harmless: converted when read"),
    "turned": Kind("note", "turned by their EXIF entry", "harmless: turned upright when read"),
    "animated": Kind("note", "animated, or of several pages", "harmless: the first is used"),
    "hidden": Kind("note", "hidden, or left behind by a tool", "harmless: not taken as classes or pictures"),
    "other-file": Kind("note", "files that are no pictures", "harmless: not taken"),
    "passed-over": Kind("note", "lying there and not taken", "harmless, if none of it was meant to be trained on"),
}
UNUSABLE = ("zero-byte", "truncated", "unreadable", "not-an-image", "bomb")  # what cannot become a picture


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    kind: str
    path: str  # of the picture; of what is not about one, the split and the class
    detail: str
    severity: Severity
    place: tuple[str, int] | None = None  # split and index of the picture

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "path": self.path, "detail": self.detail, "severity": self.severity}


def finding(
    kind: str, path: str, detail: str, place: tuple[str, int] | None = None, severity: Severity | None = None
) -> Finding:
    """A finding as grave as its kind, unless something else is known."""
    return Finding(kind, path, detail, severity or KINDS[kind].severity, place)
