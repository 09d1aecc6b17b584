"""OpenAPI models of requests and responses."""

from typing import Any

from pydantic import BaseModel, Field

from vitrail.serve.body import FIELD_NAME, FORM_TYPE, RAW_TYPE

# Examples: any image/* is accepted, video/* for a model of clips, audio/* for one of sounds.
IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "video/mp4", "audio/wav", RAW_TYPE)


class ErrorResponse(BaseModel):
    """An error response."""

    error: str = Field(description="error message, one line")


class ClassScore(BaseModel):
    label: str
    score: float = Field(
        description="probability: softmax over all classes, or sigmoid of this class if `several`", ge=0, le=1
    )


class ImagePrediction(BaseModel):
    """Predictions for one image, or an error."""

    name: str | None = Field(description="file name of the part")
    answers: list[ClassScore] = Field(default=[], description="most likely classes in descending order")
    values: dict[str, float] | None = Field(
        default=None, description="instead of answers, the numbers of a regression model by the names of its targets"
    )
    error: str | None = Field(default=None, description="instead of answers, if a part of a form is not a valid image")


class PredictionsResponse(BaseModel):
    model: str
    predictions: list[ImagePrediction] = Field(description="one per image, in request order")
    seconds: float = Field(description="from the last byte of the request to the response")


class RunLengths(BaseModel):
    """The pixels of a class, as COCO files and pycocotools have them."""

    size: list[int] = Field(description="height and width of the mask")
    counts: str = Field(description="compressed run lengths, column by column")


class MaskClass(BaseModel):
    label: str
    share: float = Field(description="share of the pixels", ge=0, le=1)
    rle: RunLengths
    colour: str = Field(description="#rrggbb")


class MaskSegment(BaseModel):
    """One object, or the region of a class without objects."""

    id: int = Field(description="from 1", ge=1)
    label: str
    thing: bool = Field(description="true for a class with objects")
    score: float = Field(description="probability of the class", ge=0, le=1)
    area: int = Field(description="pixels", ge=1)
    bbox: list[int] = Field(description="left, top, width, height")
    rle: RunLengths
    colour: str = Field(description="#rrggbb of the class")


class Mask(BaseModel):
    height: int
    width: int
    classes: list[MaskClass] = Field(default=[], description="classes that the mask has, the largest first")
    segments: list[MaskSegment] = Field(default=[], description="with panoptic=true, instead of classes")


class ImageMask(BaseModel):
    """The mask of one image, at the size of the image, or an error."""

    name: str | None = Field(description="file name of the part")
    mask: Mask | None = None
    error: str | None = Field(default=None, description="instead of a mask, if a part of a form is not a valid image")


class MasksResponse(BaseModel):
    model: str
    masks: list[ImageMask] = Field(description="one per image, in request order")
    seconds: float = Field(description="from the last byte of the request to the response")


class ImageFeatures(BaseModel):
    name: str | None
    values: list[float] = Field(default=[], description="input of the model's head")
    error: str | None = None


class FeaturesResponse(BaseModel):
    model: str
    features: list[ImageFeatures]
    seconds: float


class SoundAxesInfo(BaseModel):
    """Axes of a spectrogram; fractions are of its height from the top, and of its width."""

    hertz: list[tuple[float, str]] = Field(description="fraction and text of each mark")
    seconds: list[tuple[float, str]] = Field(description="fraction and text of each mark")
    heights: list[float] = Field(description="frequencies in Hz at even steps from the top to the bottom")
    begin: float = Field(description="time of the left edge in seconds; < 0 where the sound is padded")
    end: float = Field(description="time of the right edge in seconds")


class AttentionResponse(BaseModel):
    """Attention maps as base64 bytes: a value is byte / 255 × the scale of its map (or row)."""

    model: str
    map: list[list[float]] | None = Field(
        default=None, description="[h][w]: the requested map; the other fields are then absent"
    )
    grid: list[int] | None = Field(default=None, description="h, w: rows and columns of patches")
    size: list[int] | None = Field(default=None, description="height and width of the model's input")
    image: str | None = Field(default=None, description="the model's input as a data: URL")
    answers: list[ClassScore] = []
    layers: int | None = None
    heads: int | None = None
    reader: str | None = Field(default=None, description="source of the attention: class token, or mean of patches")
    attention: str | None = Field(default=None, description="uint8 [L, H, h, w]")
    attention_scale: list[list[float]] | None = Field(default=None, description="[L][H]")
    between: str | None = Field(default=None, description="uint8 [L, H, n, n]: from every cell to every cell")
    between_scale: str | None = Field(default=None, description="float32 [L, H, n] in base64: scale of each row")
    between_grid: list[int] | None = Field(default=None, description="rows and columns of cells, n in total")
    between_side: int | None = Field(default=None, description="patches along the side of a cell")
    rollout: str | None = Field(default=None, description="uint8 [h, w]")
    rollout_scale: float | None = None
    relevance: str | None = Field(default=None, description="uint8 [h, w]: for `target`")
    relevance_scale: float | None = None
    axes: SoundAxesInfo | None = Field(default=None, description="of a model of sounds")
    lift: int | None = Field(default=None, description="of a model of sounds: rows that the first cell lacks")
    target: str | None = None


class SpectrogramResponse(BaseModel):
    model: str
    image: str = Field(description="the spectrogram that the model takes, as a data: URL")
    axes: SoundAxesInfo


class ModelInfo(BaseModel):
    name: str
    labels: list[str] | None = Field(description="null for a model without a classifier")
    size: list[int] = Field(description="height and width of the model's input")
    clip: dict[str, int] | None = Field(description="frames, stride and views of a model of clips, which takes videos")
    sound: dict[str, float] | None = Field(description="rate in Hz and seconds of a model of sounds")
    grid: list[int] | None = Field(
        description="rows and columns of patches, of clips after steps; null if there are none"
    )
    layers: int
    heads: int
    prefix: int = Field(description="number of tokens before the patches")
    attention: bool = Field(description="true if POST /attention is supported")
    several: bool = Field(description="true for a multi-label model")
    masks: bool = Field(description="true for a segmentation model: use POST /segment")
    panoptic: bool = Field(description="true if POST /segment?panoptic=true is supported")
    numbers: bool = Field(description="true for a regression model: labels are the names of its numbers")
    colours: list[str] | None = Field(description="#rrggbb of each class of a segmentation model")
    texts: bool = Field(description="true if POST /predict takes the names of classes")
    runtime: str
    merge: int = Field(description="tokens merged in each layer")
    default: bool = Field(description="true for the model used if a request names none")


class ModelsResponse(BaseModel):
    models: list[ModelInfo]
    index: str | None = Field(default=None, description="name of the index that GET /search searches")


class SearchNeighbour(BaseModel):
    image: str = Field(description="path below the indexed folder")
    cosine: float
    thumbnail: str | None = Field(default=None, description="data URI, if asked for; null for a file that is gone")


class SearchResponse(BaseModel):
    images: int = Field(description="images in the index")
    model: str
    notes: list[str] = Field(description="what was not read of the text")
    neighbours: list[SearchNeighbour] = Field(description="the nearest first")


class ReloadResponse(BaseModel):
    reloaded: list[str]


class StatusResponse(BaseModel):
    status: str


ERROR_DESCRIPTIONS = {
    400: "Invalid or incomplete body",
    401: "Missing or invalid token",
    404: "Unknown model, layer, head or patch",
    408: "The body took too long to arrive",
    409: "Not supported by this model",
    413: "Too many bytes, pixels or images",
    415: "Unsupported content type",
    422: "Invalid parameter or image",
    500: "Internal error: see the server log",
    503: "Busy, stopping or timed out: try again after Retry-After seconds",
}


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route."""
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorResponse, "description": ERROR_DESCRIPTIONS[code]} for code in codes
    }
    if 503 in responses:
        responses[503]["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return responses


IMAGE_ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 500, 503)


def image_request_body(max_images: int) -> dict[str, Any]:
    """Return the request body: the bytes of an image, or a form with at most `max_images` images."""
    binary = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "properties": {FIELD_NAME: {"type": "array", "items": binary, "minItems": 1, "maxItems": max_images}},
        "required": [FIELD_NAME],
        "additionalProperties": False,
    }
    content: dict[str, Any] = {kind: {"schema": {**binary, "minLength": 1}} for kind in IMAGE_TYPES}
    return {"requestBody": {"required": True, "content": {**content, FORM_TYPE: {"schema": form}}}}
