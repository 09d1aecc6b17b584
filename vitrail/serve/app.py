"""The FastAPI application: routes, request handling and error responses."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import vitrail
from vitrail.deploy.runtimes.base import OutputKind
from vitrail.deploy.runtimes.panoptic import PanopticOptions
from vitrail.prompts import TEMPLATES
from vitrail.serve import openapi
from vitrail.serve.attention import AttentionViewer, MapRequest
from vitrail.serve.auth import AllowedHosts, Tokens
from vitrail.serve.batching import Convert, InferenceFailed
from vitrail.serve.body import ImagePart, receive_images
from vitrail.serve.decoding import DecodingPool, DecodingProcess
from vitrail.serve.limits import BodyMemory, QueueSlots, RequestLimits, RequestRefused
from vitrail.serve.masks import encode_mask, encode_segments
from vitrail.serve.metrics import KIND, RequestMiddleware, ServiceMetrics
from vitrail.serve.models import ServedModel, ServedModels, name_values, top_predictions
from vitrail.serve.texts import ClassesQuery, TemplateQuery, TextService, add_search_routes

log = logging.getLogger("vitrail.serve")
T = TypeVar("T")

PAGE_FILES = {
    "/": ("vitrail.serve", "page.html", "text/html"),
    "/page.css": ("vitrail.serve", "page.css", "text/css"),
    "/page.js": ("vitrail.serve", "page.js", "text/javascript"),
    "/masks.js": ("vitrail.serve", "masks.js", "text/javascript"),
    "/sounds.js": ("vitrail.serve", "sounds.js", "text/javascript"),
    "/recorder.js": ("vitrail.serve", "recorder.js", "text/javascript"),
    "/words.js": ("vitrail.serve", "words.js", "text/javascript"),
    "/find": ("vitrail.serve", "find.html", "text/html"),
    "/find.js": ("vitrail.serve", "find.js", "text/javascript"),
    "/maps.js": ("vitrail.analysis.page", "maps.js", "text/javascript"),
}
LARGE_RESPONSE = 4096  # values; larger ones are written in a thread

ModelQuery = Annotated[str | None, Query(alias="model", description="model name [the first model]", max_length=200)]
TopQuery = Annotated[int, Query(description="number of classes", ge=1, le=100_000)]
FormatQuery = Annotated[Literal["json", "png"], Query(description="run lengths in JSON, or a palette PNG of one image")]
PanopticQuery = Annotated[bool, Query(description="segments instead of a class for each pixel (EoMT)")]
ThresholdQuery = Annotated[float, Query(description="threshold of panoptic segments", ge=0, le=1)]
LayerQuery = Annotated[int | None, Query(description="layer, from 1 [the last]", ge=1, le=10_000)]
HeadQuery = Annotated[str | None, Query(description="head, from 0, or mean [mean]", pattern=r"^(mean|[0-9]{1,4})$")]
PatchQuery = Annotated[
    str | None,
    Query(description="row,column, from 0 [class token or mean of patches]", pattern=r"^[0-9]{1,4},[0-9]{1,4}$"),
]


class Service:
    """State shared by all requests: models, decoders, limits, access, metrics and queues."""

    def __init__(
        self,
        models: ServedModels,
        pool: DecodingPool,
        limits: RequestLimits,
        tokens: Tokens,
        hosts: AllowedHosts,
        metrics: ServiceMetrics,
    ) -> None:
        self.models, self.pool, self.limits, self.memory = models, pool, limits, pool.decoder.memory
        self.tokens, self.hosts, self.metrics = tokens, hosts, metrics
        self.body_memory = BodyMemory(limits.body_memory, self.memory)
        self.image_slots = QueueSlots(limits.queue, "images")
        self.attention_slots = QueueSlots(limits.attention_requests, "attention requests")
        self.attention_process = DecodingProcess(pool.decoder)
        self.attention_viewer = AttentionViewer(self.attention_process.decode_any)
        self.attention_pool = ThreadPoolExecutor(1, thread_name_prefix="attention")
        self.writing_pool = ThreadPoolExecutor(1, thread_name_prefix="writing")
        self.texts = TextService(limits.seconds)
        self.stuck: list[str] = []  # models without a worker that ends its batch
        self.stopping = False
        metrics.queued.set_function(lambda: self.image_slots.taken)

    async def run_model(
        self,
        request: Request,
        name: str | None,
        output_kind: OutputKind,
        convert: Convert | None = None,
        max_images: int | None = None,
    ) -> "RequestOutputs":
        """Read a request's images and run the model: a row of outputs, converted if asked for, or an error for each image."""
        self.check_works(self.models.get(name))
        address = client_address(request)
        self.image_slots.check_free(address=address)
        async with receive_images(request, self.limits, self.body_memory) as parts:
            if max_images is not None and len(parts) > max_images:
                raise RequestRefused(413, f"a PNG is the mask of one image, got {len(parts)}: leave out format=png")
            begin = time.perf_counter()
            with self.image_slots.reserve(len(parts) * self.models.get(name).slots, address):
                served, rows = await self.wait_for(request, self.submit(name, output_kind, parts, convert))
        for row in rows:
            if isinstance(row, BaseException) and not isinstance(row, RequestRefused):
                raise row
            outcome = "unreadable" if isinstance(row, RequestRefused) else "answered"
            self.metrics.images.labels(served.name, outcome).inc()
        if isinstance(rows[0], RequestRefused) and parts[0].name is None and len(parts) == 1:
            raise rows[0]  # the body was this image alone
        return RequestOutputs(served, [part.name for part in parts], rows, time.perf_counter() - begin)

    async def require_token(self, request: Request) -> None:
        """Refuse a request without a valid bearer token if tokens are configured."""
        if self.tokens and not self.tokens.is_allowed(request.headers.get("authorization")):
            raise RequestRefused(401, "missing or invalid token: send the header Authorization: Bearer TOKEN")

    def check_works(self, served: ServedModel) -> None:
        """Refuse a request to a model that does not end its batches."""
        if served.name in self.stuck:
            raise RequestRefused(503, f"{served.name!r} has not returned for {self.limits.seconds:g} s", 30)

    def find_stuck(self) -> None:
        """Fail batches that take longer than a request may. Called every few seconds."""
        known, self.stuck = self.stuck, self.models.find_stuck(self.limits.seconds)
        for name in set(self.stuck) - set(known):
            log.error("model %s has not returned for %g s", name, self.limits.seconds)

    async def write_response(self, rows: "RequestOutputs", key: str, convert: Any, field: str) -> Response:
        """Return the response; a large one is written in a thread."""

        def write() -> Response:
            return JSONResponse(rows.to_json(key, convert, field))

        if sum(map(count_values, rows.outputs)) <= LARGE_RESPONSE:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self.writing_pool, write)

    async def submit(
        self, name: str | None, output_kind: OutputKind, parts: list[ImagePart], convert: Convert | None = None
    ) -> tuple[ServedModel, list[Any]]:
        """Submit images to the model currently served under a name, and wait for its outputs."""
        served, batcher = await self.models.get_batcher(name, output_kind)
        return served, await asyncio.gather(*batcher.submit(parts, convert), return_exceptions=True)

    async def wait_for(self, request: Request, work: Awaitable[T]) -> T:
        """Wait for work until it is done, the client disconnects, or the request times out."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect follows
        try:
            done, _ = await asyncio.wait({task, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if gone in done:
                raise RequestRefused(400, "the client disconnected before the response")
            raise RequestRefused(503, f"no response within {self.limits.seconds:g} s: try again later", 5)
        finally:
            gone.cancel()
            task.cancel()

    async def compute_view(
        self, request: Request, name: str | None, view: Callable[[ServedModel, ImagePart], dict[str, Any]]
    ) -> Response:
        """Compute attention maps or the spectrogram of one input; requests are processed one at a time."""
        served = self.models.get(name)
        address = client_address(request)
        self.attention_slots.check_free(address=address)
        async with receive_images(request, self.limits, self.body_memory) as parts:
            if len(parts) > 1:
                raise RequestRefused(413, f"this route takes one file per request, got {len(parts)}")
            with self.attention_slots.reserve(1, address):

                def compute() -> Response:
                    return JSONResponse(view(served, parts[0]))

                loop = asyncio.get_running_loop()
                return await self.wait_for(request, loop.run_in_executor(self.attention_pool, compute))

    async def reload(self) -> list[str]:
        """Reload all models; raise at the first that fails, which keeps its old version."""
        for name in self.models.served:
            try:
                await self.models.reload(name)
            except (ValueError, OSError) as error:
                self.metrics.reloads.labels(name, "failed").inc()
                log.error("cannot reload %s, keeping the old version: %s", name, error)
                message = f"cannot reload {name!r}, keeping the old version: see the server log"
                raise RequestRefused(409, message) from None
            self.metrics.reloads.labels(name, "done").inc()
            log.info("reloaded %s", name)
        return list(self.models.served)

    def close(self) -> None:
        """Stop all threads. Call it when no request is left."""
        self.models.close()
        self.pool.close()
        self.attention_process.close()
        self.texts.close()
        for pool in (self.attention_pool, self.writing_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def count_values(row: Any) -> int:
    """Return the number of values that the response has of a row; of a mask or segments, the characters of run lengths."""
    if isinstance(row, dict):
        return sum(len(item["rle"]["counts"]) for item in row.get("classes", row.get("segments", ())))
    return row.size if isinstance(row, np.ndarray) else 0


def client_address(request: Request) -> str:
    """Return the address that a request comes from; behind a proxy, that of the proxy."""
    return request.client.host if request.client else ""


class RequestOutputs:
    """Model outputs for the images of one request."""

    def __init__(self, served: ServedModel, names: list[str | None], outputs: list[Any], seconds: float) -> None:
        self.served, self.names, self.outputs, self.seconds = served, names, outputs, seconds

    def to_json(self, key: str, convert: Any, field: str) -> dict[str, Any]:
        """Return the response: a list under `key` with `convert(row)` of each image under `field`."""
        items = [
            {"name": name, "error": row.message}
            if isinstance(row, RequestRefused)
            else {"name": name, field: convert(row)}
            for name, row in zip(self.names, self.outputs, strict=True)
        ]
        return {"model": self.served.name, key: items, "seconds": round(self.seconds, 6)}


def create_app(service: Service) -> ASGIApp:
    """Return the application with all routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="vitrail",
        version=vitrail.__version__,
        description="Classes, numbers, masks, features and attention of images, videos and sounds, from Vision Transformers.",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        lifespan=lifespan,
    )
    add_error_handlers(app)
    add_status_routes(app, service)
    add_inference_routes(app, service)
    add_search_routes(app, service.texts, [Depends(service.require_token)])
    add_page_routes(app)
    return RequestMiddleware(app, service.metrics, service.hosts)


def add_inference_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that accept images."""
    allowed, body = [Depends(service.require_token)], openapi.image_request_body(service.limits.images)

    @app.post(
        "/predict",
        responses={200: {"model": openapi.PredictionsResponse}, **openapi.IMAGE_ERRORS},
        dependencies=allowed,
        openapi_extra=body,
    )
    async def predict(
        request: Request,
        model: ModelQuery = None,
        top: TopQuery = 5,
        classes: ClassesQuery = None,
        template: TemplateQuery = TEMPLATES[0],
    ) -> Response:
        """Return the most likely classes of one or more images, or the numbers that a regression model predicts.

        A model with a text tower and no classes of its own chooses among the names in `classes`.
        """
        served = service.models.get(model)
        if served.texts is not None:
            if classes is None:
                raise RequestRefused(409, f"{served.name!r} has no classes: name them in classes=, or use POST /embed")
            words = await service.texts.run(served.texts.classify, classes, template)
            rows = await service.run_model(request, model, "features", words.compute_logits)
            return await service.write_response(
                rows, "predictions", lambda row: top_predictions(row, words.labels, False, top), "answers"
            )
        if classes is not None:
            raise RequestRefused(409, f"{served.name!r} has no text tower: leave out classes")
        if not served.has_classes and not served.has_numbers:
            reason, path = ("predicts masks", "segment") if served.has_masks else ("has no classifier", "embed")
            raise RequestRefused(409, f"{served.name!r} {reason}: use POST /{path}")
        rows = await service.run_model(request, model, "logits")
        labels, several = rows.served.contract.labels, rows.served.contract.several
        if rows.served.has_numbers:
            return await service.write_response(rows, "predictions", lambda row: name_values(row, labels), "values")
        return await service.write_response(
            rows, "predictions", lambda row: top_predictions(row, labels, several, top), "answers"
        )

    png = {"description": "The masks, or with format=png the mask of one image", "content": {"image/png": {}}}

    @app.post(
        "/segment",
        responses={200: {"model": openapi.MasksResponse, **png}, **openapi.IMAGE_ERRORS},
        dependencies=allowed,
        openapi_extra=body,
    )
    async def segment(
        request: Request,
        model: ModelQuery = None,
        format: FormatQuery = "json",
        panoptic: PanopticQuery = False,
        score_threshold: ThresholdQuery = PanopticOptions.score_threshold,
        mask_threshold: ThresholdQuery = PanopticOptions.mask_threshold,
        overlap_threshold: ThresholdQuery = PanopticOptions.overlap_threshold,
    ) -> Response:
        """Return the class of every pixel of one or more images, as run lengths or, for one image, as a palette PNG.

        With `panoptic`, return the segments of an EoMT model: objects, and regions of classes without objects.
        """
        served = service.models.get(model)
        if not served.has_masks:
            reason, path = ("predicts classes", "predict") if served.has_classes else ("has no classifier", "embed")
            reason, path = ("predicts numbers", "predict") if served.has_numbers else (reason, path)
            raise RequestRefused(409, f"{served.name!r} {reason}: use POST /{path}")
        as_png = format == "png"
        if panoptic:
            if not served.has_queries:
                raise RequestRefused(409, f"{served.name!r} has no queries: panoptic needs a checkpoint of EoMT")
            if as_png:
                raise RequestRefused(422, "segments are JSON: leave out format=png or panoptic")
            options = PanopticOptions(score_threshold, mask_threshold, overlap_threshold)
            convert = partial(encode_segments, reader=served.build_reader(options), contract=served.contract)
            rows = await service.run_model(request, model, "queries", convert)
            return await service.write_response(rows, "masks", lambda row: row, "mask")
        convert = partial(encode_mask, contract=served.contract, as_png=as_png)
        rows = await service.run_model(request, model, "logits", convert, max_images=1 if as_png else None)
        if not as_png:
            return await service.write_response(rows, "masks", lambda row: row, "mask")
        (row,) = rows.outputs
        if isinstance(row, RequestRefused):
            raise row
        return Response(row, media_type="image/png")

    @app.post(
        "/embed",
        responses={200: {"model": openapi.FeaturesResponse}, **openapi.IMAGE_ERRORS},
        dependencies=allowed,
        openapi_extra=body,
    )
    async def embed(request: Request, model: ModelQuery = None) -> Response:
        """Return the features of one or more images: the input of the model's head."""
        rows = await service.run_model(request, model, "features")
        return await service.write_response(rows, "features", lambda row: row.tolist(), "values")

    @app.post(
        "/attention",
        responses={200: {"model": openapi.AttentionResponse}, **openapi.IMAGE_ERRORS},
        dependencies=allowed,
        openapi_extra=openapi.image_request_body(1),
    )
    async def attention(
        request: Request,
        model: ModelQuery = None,
        layer: LayerQuery = None,
        head: HeadQuery = None,
        patch: PatchQuery = None,
    ) -> Response:
        """Return all attention maps of one image, or a single map if layer, head or patch is given."""
        wanted = None
        if layer is not None or head is not None or patch is not None:
            row, _, column = (patch or "").partition(",")
            wanted = MapRequest(
                layer,
                "mean" if head is None or head == "mean" else int(head),
                (int(row), int(column)) if patch is not None else None,
            )
        return await service.compute_view(
            request, model, lambda served, part: service.attention_viewer(served, part, wanted)
        )

    @app.post(
        "/spectrogram",
        responses={200: {"model": openapi.SpectrogramResponse}, **openapi.IMAGE_ERRORS},
        dependencies=allowed,
        openapi_extra=openapi.image_request_body(1),
    )
    async def spectrogram(request: Request, model: ModelQuery = None) -> Response:
        """Return the spectrogram that a model of sounds takes, as an image with axes in Hz and seconds."""
        return await service.compute_view(request, model, service.attention_viewer.draw_spectrogram)


def add_status_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for models, health, metrics and reload."""
    allowed = [Depends(service.require_token)]

    @app.get(
        "/models",
        responses={200: {"model": openapi.ModelsResponse}, **openapi.error_responses(401)},
        dependencies=allowed,
    )
    async def models() -> Response:
        """Return the served models."""
        index = service.texts.index
        return JSONResponse({"models": service.models.describe(), "index": index and index.directory.name})

    @app.get("/healthz", responses={200: {"model": openapi.StatusResponse}, **openapi.error_responses(503)})
    async def healthz() -> Response:
        """Return 200 while the process is alive, also while it loads models; 503 if a model no longer returns."""
        for served in service.models.served.values():
            service.check_works(served)
        return JSONResponse({"status": "alive"})

    @app.get("/readyz", responses={200: {"model": openapi.StatusResponse}, **openapi.error_responses(503)})
    async def readyz() -> Response:
        """Return 200 while the service accepts requests, 503 while it loads models or stops."""
        if service.stopping:
            raise RequestRefused(503, "the service is stopping", 5)
        service.check_works(service.models.get(None))
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **openapi.error_responses(401)},
        response_class=Response,
        dependencies=allowed,
    )
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return Response(service.metrics.to_text(), media_type=KIND)

    if service.tokens:

        @app.post(
            "/reload",
            responses={200: {"model": openapi.ReloadResponse}, **openapi.error_responses(401, 409, 500)},
            dependencies=allowed,
        )
        async def reload() -> Response:
            """Reload the models' files without dropping a request. Available only if tokens are configured."""
            return JSONResponse({"reloaded": await service.reload()})


def add_page_routes(app: FastAPI) -> None:
    """Add the routes of the web page and its files."""
    for path, (package, name, kind) in PAGE_FILES.items():
        content = (files(package) / name).read_bytes()

        async def send_file(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

        app.add_api_route(path, send_file, include_in_schema=False)


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers that return every error as one line of JSON."""

    async def handle_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": error.message}, error.status, headers)

    async def handle_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": f"{error.detail}"}, error.status_code, dict(error.headers or {}))

    async def handle_invalid_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(str(at) for at in first['loc'][1:])}: {first['msg']}"}, 422)

    async def handle_failure(_: Request, error: Exception) -> Response:
        line = str(error) if isinstance(error, InferenceFailed) else "internal error: see the server log"
        return JSONResponse({"error": line}, 500)

    app.add_exception_handler(RequestRefused, handle_refusal)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(RequestValidationError, handle_invalid_query)
    app.add_exception_handler(Exception, handle_failure)
