"""The application: from an HTTP request to an answer in JSON."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import vitrail
from vitrail.deploy.runtime import Gives
from vitrail.serve import described
from vitrail.serve.answers import answers
from vitrail.serve.attention import Looking, Map
from vitrail.serve.batching import Failed
from vitrail.serve.body import received
from vitrail.serve.counted import Counted
from vitrail.serve.decoding import Decoder
from vitrail.serve.limits import Held, Limits, Places, Refused
from vitrail.serve.metrics import KIND, Metrics
from vitrail.serve.models import Models, Served
from vitrail.serve.multipart import Part
from vitrail.serve.tokens import Tokens

log = logging.getLogger("vitrail.serve")
T = TypeVar("T")

PAGE = {
    "/": ("vitrail.serve", "page.html", "text/html"),
    "/page.css": ("vitrail.serve", "page.css", "text/css"),
    "/page.js": ("vitrail.serve", "page.js", "text/javascript"),
    "/maps.js": ("vitrail.views", "maps.js", "text/javascript"),
}
# The page takes scripts and styles from here alone, and speaks to nobody else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Name = Annotated[str | None, Query(alias="model", description="which model; the first unless given", max_length=200)]
Top = Annotated[int, Query(description="how many answers", ge=1, le=100_000)]
Layer = Annotated[int | None, Query(description="from 1; the last unless given", ge=1, le=10_000)]
Head = Annotated[
    str | None, Query(description="from 0, or mean; the mean unless given", pattern=r"^(mean|[0-9]{1,4})$")
]
Patch = Annotated[
    str | None,
    Query(description="row,column from 0; what the model reads from unless given", pattern=r"^[0-9]{1,4},[0-9]{1,4}$"),
]


class Service:
    """What all requests share."""

    def __init__(self, models: Models, decoder: Decoder, limits: Limits, tokens: Tokens, metrics: Metrics) -> None:
        self.models, self.decoder, self.limits = models, decoder, limits
        self.tokens, self.metrics = tokens, metrics
        self.held = Held(limits.held, decoder.memory)
        self.places = Places(limits.queue, "pictures")
        self.looks = Places(limits.looks, "requests for attention")
        self.looking = Looking(decoder)
        self.looker = ThreadPoolExecutor(1, thread_name_prefix="looking")
        self.stopping = False
        metrics.waiting.set_function(lambda: self.places.taken)

    async def rows(self, request: Request, name: str | None, gives: Gives) -> "Rows":
        """Reads a request's pictures and has the model answer: a row of numbers for each, or why there is none."""
        self.models.get(name)
        self.places.check()
        async with received(request, self.limits, self.held) as parts:
            begin = time.perf_counter()
            with self.places.taking(len(parts)):
                served, found = await self.in_time(request, self.asked(name, gives, parts))
        for row in found:
            if isinstance(row, BaseException) and not isinstance(row, Refused):
                raise row
            self.metrics.pictures.labels(served.name, "unreadable" if isinstance(row, Refused) else "answered").inc()
        if isinstance(found[0], Refused) and parts[0].name is None and len(parts) == 1:
            raise found[0]  # the whole request was this picture
        return Rows(served, [part.name for part in parts], found, time.perf_counter() - begin)

    async def asked(
        self, name: str | None, gives: Gives, parts: list[Part]
    ) -> tuple[Served, list[np.ndarray | BaseException]]:
        """Asks the model that has this name now, and waits."""
        served, line = await self.models.line_of(name, gives)
        return served, await asyncio.gather(*line.ask(parts), return_exceptions=True)

    async def in_time(self, request: Request, work: Awaitable[T]) -> T:
        """Waits for work while the client does, and no longer than a request may take."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())  # after the body nothing comes but the end of the connection
        try:
            done, _ = await asyncio.wait({task, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if gone in done:
                raise Refused(400, "the client left before its answer")
            raise Refused(503, f"no answer within {self.limits.seconds:g} s: try again later", 5)
        finally:
            gone.cancel()
            task.cancel()

    async def look(self, request: Request, name: str | None, wanted: Map | None) -> dict[str, Any]:
        """Looks into a model, one picture after another."""
        served = self.models.get(name)
        self.looks.check()
        async with received(request, self.limits, self.held) as parts:
            if len(parts) > 1:
                raise Refused(413, f"{len(parts)} pictures: attention is looked at one by one")
            with self.looks.taking(1):
                loop = asyncio.get_running_loop()
                found = loop.run_in_executor(self.looker, self.looking, served, parts[0], wanted)
                return await self.in_time(request, found)

    async def reload(self) -> list[str]:
        """Opens all models anew; the first that cannot be is told, and goes on as it was."""
        for name in self.models.served:
            try:
                await self.models.reload(name)
            except (ValueError, OSError) as error:
                self.metrics.reloads.labels(name, "failed").inc()
                log.error("%s could not be opened anew and goes on as it was: %s", name, error)
                raise Refused(
                    409, f"{name!r} could not be opened anew and goes on as it was; the log says why"
                ) from None
            self.metrics.reloads.labels(name, "done").inc()
            log.info("%s was opened anew", name)
        return list(self.models.served)

    def close(self) -> None:
        """Ends threads, when nobody asks any more."""
        self.models.close()
        self.looker.shutdown(wait=False, cancel_futures=True)


class Rows:
    """The model's numbers for the pictures of one request."""

    def __init__(self, served: Served, names: list[str | None], found: list[Any], seconds: float) -> None:
        self.served, self.names, self.found, self.seconds = served, names, found, seconds

    def told(self, key: str, of_one: Any, what: str) -> dict[str, Any]:
        """As JSON: `of_one` says what a row means, under `what`."""
        each = [
            {"name": name, "error": row.line} if isinstance(row, Refused) else {"name": name, what: of_one(row)}
            for name, row in zip(self.names, self.found, strict=True)
        ]
        return {"model": self.served.name, key: each, "seconds": round(self.seconds, 6)}


def application(service: Service) -> FastAPI:
    """The application, with all its routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="vitrail",
        version=vitrail.__version__,
        description="Vision Transformers that answer: send pictures, get classes, features or what the model looks at.",
        docs_url=None,  # these would ask the network for scripts
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Counted, metrics=service.metrics)
    refuse(app)
    about(app, service)
    asking(app, service)
    page(app)
    return app


def asking(app: FastAPI, service: Service) -> None:
    """The routes that take pictures."""
    allowed, body = [Depends(Allowed(service.tokens))], described.body(service.limits.pictures)

    @app.post(
        "/predict",
        responses={200: {"model": described.Predictions}, **described.OF_PICTURES},
        dependencies=allowed,
        openapi_extra=body,
    )
    async def predict(request: Request, model: Name = None, top: Top = 5) -> Response:
        """The likeliest classes of one or many pictures."""
        served = service.models.get(model)
        if not served.predicts:
            raise Refused(409, f"{served.name!r} ends in features and has no classes: ask POST /embed")
        rows = await service.rows(request, model, "logits")
        labels, several = rows.served.contract.labels, rows.served.contract.several
        return JSONResponse(rows.told("predictions", lambda row: answers(row, labels, several, top), "answers"))

    @app.post(
        "/embed",
        responses={200: {"model": described.Features}, **described.OF_PICTURES},
        dependencies=allowed,
        openapi_extra=body,
    )
    async def embed(request: Request, model: Name = None) -> Response:
        """The features of one or many pictures: what comes to the model's head."""
        rows = await service.rows(request, model, "features")
        return JSONResponse(rows.told("features", lambda row: row.tolist(), "values"))

    @app.post(
        "/attention",
        responses={200: {"model": described.Attention}, **described.OF_PICTURES},
        dependencies=allowed,
        openapi_extra=described.body(1),
    )
    async def attention(
        request: Request, model: Name = None, layer: Layer = None, head: Head = None, patch: Patch = None
    ) -> Response:
        """What a model looks at in one picture: everything; or one map, where a layer, a head or a patch is asked for."""
        wanted = None
        if layer is not None or head is not None or patch is not None:
            row, _, column = (patch or "").partition(",")
            wanted = Map(
                layer,
                "mean" if head is None or head == "mean" else int(head),
                (int(row), int(column)) if patch is not None else None,
            )
        return JSONResponse(await service.look(request, model, wanted))


def about(app: FastAPI, service: Service) -> None:
    """The routes that tell of the service itself."""
    allowed = [Depends(Allowed(service.tokens))]

    @app.get("/models", responses={200: {"model": described.Models}, **described.refusals(401)}, dependencies=allowed)
    async def models() -> Response:
        """The models that answer."""
        return JSONResponse({"models": service.models.facts()})

    @app.get("/healthz", responses={200: {"model": described.State}})
    async def healthz() -> Response:
        """Whether the process is alive."""
        return JSONResponse({"status": "alive"})

    @app.get("/readyz", responses={200: {"model": described.State}, **described.refusals(503)})
    async def readyz() -> Response:
        """Whether requests should be sent here: not while it stops."""
        if service.stopping:
            raise Refused(503, "stopping: send requests elsewhere", 5)
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **described.refusals(401)},
        response_class=Response,
        dependencies=allowed,
    )
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=KIND)

    if service.tokens:

        @app.post(
            "/reload",
            responses={200: {"model": described.Reloaded}, **described.refusals(401, 409, 500)},
            dependencies=allowed,
        )
        async def reload() -> Response:
            """Opens the models' files anew, without dropping a request; only where tokens are asked for."""
            return JSONResponse({"reloaded": await service.reload()})


def page(app: FastAPI) -> None:
    """The page for people, from our own files."""
    for path, (package, name, kind) in PAGE.items():
        content = (files(package) / name).read_bytes()

        async def given(content: bytes = content, kind: str = kind) -> Response:
            return Response(
                content, media_type=kind, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
            )

        app.add_api_route(path, given, include_in_schema=False)


class Allowed:
    """Lets through whoever brings a token, where tokens are asked for."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    async def __call__(self, request: Request) -> None:
        if self.tokens and not self.tokens.allow(request.headers.get("authorization")):
            raise Refused(401, "no right token: send the header Authorization: Bearer TOKEN")


def refuse(app: FastAPI) -> None:
    """Whatever goes wrong is one line of JSON."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        headers = {"Retry-After": str(error.retry)} if error.retry is not None else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": error.line}, error.status, headers)

    async def strange(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": f"{error.detail}"}, error.status_code, dict(error.headers or {}))

    async def misplaced(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(str(at) for at in first['loc'][1:])}: {first['msg']}"}, 422)

    async def failed(_: Request, error: Exception) -> Response:
        line = str(error) if isinstance(error, Failed) else "a mistake of the service's: its log tells more"
        return JSONResponse({"error": line}, 500)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, strange)
    app.add_exception_handler(RequestValidationError, misplaced)
    app.add_exception_handler(Exception, failed)
