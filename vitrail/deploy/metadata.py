"""What a model promises, as the JSON that is written into every exported file: labels, preprocessing and where it comes from.

Reading trusts nothing: a file may be damaged, or somebody else's.
"""

import json
from dataclasses import fields
from typing import Any, Literal

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Contract
from vitrail.models.written import dataclass_from_json, read_value
from vitrail.models.written import from_json as config_from_json
from vitrail.models.written import to_json as written

KEY = "vitrail"  # what it is called in the file's own metadata
FORMAT = 1
Input = Literal["uint8", "float"]  # pixels as they are, or normalised beforehand
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
PLAIN: dict[str, Any] = {
    "labels": tuple[str, ...] | None,
    "several": bool,
    "merge": int,
    "precision": str,
    "any_size": bool,
    "name": str,
    "checksum": str,
}


def to_json(contract: Contract, input: Input) -> str:
    """The contract and what the graph takes, as one line of text."""
    told = {field.name: getattr(contract, field.name) for field in fields(contract)}
    told |= {"preprocessing": written(contract.preprocessing), "labels": contract.labels and list(contract.labels)}
    return json.dumps({"format": FORMAT, "input": input} | told)


def from_json(text: str) -> tuple[Contract, Input]:
    """What `to_json` wrote, or one line that says what is wrong with it."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its description by vitrail is not readable ({error})") from None
    if not isinstance(told, dict):
        raise ValueError("its description by vitrail is not a table")
    if told.get("format") != FORMAT:
        raise ValueError(
            f"its description has the form {told.get('format')!r} and this vitrail reads {FORMAT}: "
            "export the model anew, or update vitrail"
        )
    if lacking := sorted({"input", "preprocessing", "config", *PLAIN} - set(told)):
        raise ValueError(f"its description by vitrail lacks {', '.join(lacking)}")
    if told["input"] not in ("uint8", "float"):
        raise ValueError(f"it takes {told['input']!r}, which is neither uint8 nor float")
    values = {name: read_value(told[name], kind, name) for name, kind in PLAIN.items()}
    preprocessing = dataclass_from_json(told["preprocessing"], Preprocessing, "preprocessing")
    contract = Contract(preprocessing, config=told["config"], **values)
    check(contract)
    return contract, told["input"]


def check(contract: Contract) -> None:
    """Refuses a contract whose parts do not agree."""
    if contract.precision not in PRECISIONS:
        raise ValueError(f"its precision is {contract.precision!r}: known are {', '.join(PRECISIONS)}")
    if contract.merge < 0:
        raise ValueError(f"it merges {contract.merge} tokens in each layer: 0 or more")
    config = config_from_json(contract.config)
    if contract.labels is not None and len(contract.labels) != config.classes:
        raise ValueError(f"it has {len(contract.labels)} labels for {config.classes} classes")
    if contract.preprocessing.channels != config.channels:
        raise ValueError(
            f"its preprocessing gives {contract.preprocessing.channels} channels, the model takes {config.channels}"
        )
