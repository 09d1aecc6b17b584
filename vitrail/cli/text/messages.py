"""Messages of the library for the command line: parameters spelt as options.

Below `cli/`, a message names a parameter as Python does, `batch_size=2`. Here it becomes `--batch-size 2`, if a command has that
option.
"""

import re
import shlex
from collections.abc import Mapping

ALIASES = {
    "class_map": "map",
    "form": "format",
    "trackers": "log",
    "drawn": "per_class_seed",
}  # names of options that Python calls otherwise
FUNCTIONS = "train|pretrain|evaluate|predict|embed|check|export"
PATTERN = re.compile(
    r"""--[a-z][\w-]*(?:\ \S+=\S*)?                       # spelt already: --set NAME=VALUE
    | settings=\[(?P<settings>(?:(?:'[^']*'|"[^"]*")(?:,\ )?)+)\]
    | assume=\{'(?P<assumed>\w+)':\ (?P<value>[^}]*)\}
    | vitrail\.resume\((?P<run>'[^',]*'|"[^",]*")\)
    | vitrail\.\w+\([^()]*\)                              # an example in Python
    | \b[A-Z]\w*\([^()]*\)                               # an object: Relative(at='every')
    | vitrail\.evaluation\.probes\.(?P<probe>probe)\b
    | \bvitrail\.(?P<function>"""
    + FUNCTIONS
    + r""")\b(?!\()
    | (?<![\w.'"\[/?&-])(?P<name>[a-z]\w*)=(?P<given>'[^']*'|"[^"]*"|\([^()]*\)|[\w…]+(?:\.\w+)*)?""",
    re.VERBOSE,
)


def spell_options(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with its parameters as options; `flags` has the spelling of each by name."""

    def spell(match: re.Match[str]) -> str:
        if match["settings"] is not None:
            settings = re.findall(r"'([^']*)'|\"([^\"]*)\"", match["settings"])
            return " ".join(f"--set {single or double}" for single, double in settings)
        if match["assumed"] is not None:
            return f"--assume {match['assumed']}={match['value'].strip(chr(39))}"
        if match["run"] is not None:
            return f"vitrail train --resume {shlex.quote(match['run'][1:-1])}"
        if match["probe"] is not None:
            return "--probe knn, linear or few-shot"
        if match["function"] is not None:
            return f"vitrail {match['function']}"
        name = match["name"] and ALIASES.get(match["name"], match["name"])
        flag = "--set" if name == "settings" else flags.get(name) if name else None
        return match[0] if flag is None else f"{flag} {spell_value(match['given'])}".rstrip()

    return PATTERN.sub(spell, text)


def spell_value(value: str | None) -> str:
    """Return a value as it is typed after an option: quoted for a shell, tuples with commas; nothing for a switch."""
    if value is None or value == "True":
        return ""
    if value[0] in "'\"":
        return shlex.quote(value[1:-1])
    return ",".join(part.strip() for part in value[1:-1].split(",")) if value[0] == "(" else value
