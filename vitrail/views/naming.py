"""A class by its name or its number."""

from vitrail.models.sizes import closest
from vitrail.models.vit import ViT


def target_of(model: ViT, text: str) -> int:
    """The index of a class: a name of the model's, whatever its case, or a number from 0."""
    count = model.config.classes
    if count is None:
        raise ValueError(f"--target {text}: this model ends in features and has no classes")
    names = model.labels or ()
    for same in (lambda name: name == text, lambda name: name.casefold() == text.casefold()):
        found = [index for index, name in enumerate(names) if same(name)]
        if len(found) == 1:
            return found[0]
    if text.isdecimal() and int(text) < count:
        return int(text)
    if text.isdecimal():
        raise ValueError(f"--target {text}: this model has the classes 0 to {count - 1}")
    if not names:
        raise ValueError(f"--target {text}: this model knows no names of classes, so give an index, 0 to {count - 1}")
    known = list(names)
    likely = closest(text, known).split("Known:")[0].strip()
    raise ValueError(
        f"--target {text}: no such class. {likely or f'The model knows {known[0]!r}, {known[1 % count]!r} …'}"
    )
