"""What the service takes and answers, for OpenAPI."""

from typing import Any

from pydantic import BaseModel, Field

from vitrail.serve.body import FORM, RAW
from vitrail.serve.multipart import FIELD

PICTURES = ("image/jpeg", "image/png", "image/webp", RAW)  # named here; any image/… is taken


class Error(BaseModel):
    """Every refusal."""

    error: str = Field(description="what is wrong, in one line")


class Answer(BaseModel):
    label: str
    score: float = Field(
        description="a probability: of all classes together, or of this one alone if `several`", ge=0, le=1
    )


class Prediction(BaseModel):
    """What was found in one picture, or why nothing was."""

    name: str | None = Field(description="the part's file name")
    answers: list[Answer] = Field(default=[], description="the likeliest classes, the likeliest first")
    error: str | None = Field(default=None, description="instead of answers, where a form's part cannot be read")


class Predictions(BaseModel):
    model: str
    predictions: list[Prediction] = Field(description="one for each picture, in the order they were sent")
    seconds: float = Field(description="from the last byte of the request to the answer")


class Feature(BaseModel):
    name: str | None
    values: list[float] = Field(default=[], description="what comes to the model's head")
    error: str | None = None


class Features(BaseModel):
    model: str
    features: list[Feature]
    seconds: float


class Attention(BaseModel):
    """Maps are bytes in base64: a value is its byte / 255 × the scale of its map (or row)."""

    model: str
    map: list[list[float]] | None = Field(
        default=None, description="[h][w]: the one map that was asked for, and nothing else"
    )
    grid: list[int] | None = Field(default=None, description="h, w: patches down and across")
    size: list[int] | None = Field(default=None, description="height and width of the picture as the model sees it")
    picture: str | None = Field(default=None, description="that picture, as a data: address")
    answers: list[Answer] = []
    layers: int | None = None
    heads: int | None = None
    reader: str | None = Field(default=None, description="whose attention it is: class token, or mean of patches")
    attention: str | None = Field(default=None, description="uint8 [L, H, h, w]")
    attention_scale: list[list[float]] | None = Field(default=None, description="[L][H]")
    between: str | None = Field(default=None, description="uint8 [L, H, n, n]: of every cell to every cell")
    between_scale: str | None = Field(default=None, description="float32 [L, H, n], in base64: of each row")
    between_grid: list[int] | None = Field(default=None, description="cells down and across, n in all")
    between_side: int | None = Field(default=None, description="patches along the side of a cell")
    rollout: str | None = Field(default=None, description="uint8 [h, w]")
    rollout_scale: float | None = None
    relevance: str | None = Field(default=None, description="uint8 [h, w]: for `target`")
    relevance_scale: float | None = None
    target: str | None = None


class Model(BaseModel):
    name: str
    labels: list[str] | None = Field(description="null for a model that ends in features")
    size: list[int] = Field(description="height and width that pictures are brought to")
    grid: list[int] | None = Field(description="patches down and across; null where there are none")
    layers: int
    heads: int
    prefix: int = Field(description="tokens before the patches")
    attention: bool = Field(description="whether POST /attention can look into it")
    several: bool = Field(description="whether a picture may have several labels")
    runtime: str
    merge: int = Field(description="tokens merged in each layer")
    default: bool = Field(description="whether it answers where a request names no model")


class Models(BaseModel):
    models: list[Model]


class Reloaded(BaseModel):
    reloaded: list[str]


class State(BaseModel):
    status: str


REFUSALS = {
    400: "The body is broken or was cut off",
    401: "No right token",
    404: "No such model, layer, head or patch",
    408: "The body came too slowly",
    409: "The model cannot do this",
    413: "Too many bytes, pixels or pictures",
    415: "Not a kind of body that is taken",
    422: "A value is out of place, or the picture cannot be read",
    500: "A mistake of the service's; its log tells more",
    503: "Busy, stopping or too slow: try again after Retry-After seconds",
}


def refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Answers that a route may give instead of its own."""
    made: dict[int | str, dict[str, Any]] = {code: {"model": Error, "description": REFUSALS[code]} for code in codes}
    if 503 in made:
        made[503]["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return made


OF_PICTURES = refusals(400, 401, 404, 408, 409, 413, 415, 422, 500, 503)


def body(most: int) -> dict[str, Any]:
    """A request's body: the bytes of a picture, or a form with at most so many."""
    binary = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "properties": {FIELD: {"type": "array", "items": binary, "minItems": 1, "maxItems": most}},
        "required": [FIELD],
        "additionalProperties": False,
    }
    content: dict[str, Any] = {kind: {"schema": {**binary, "minLength": 1}} for kind in PICTURES}
    return {"requestBody": {"required": True, "content": {**content, FORM: {"schema": form}}}}
