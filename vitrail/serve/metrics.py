"""Prometheus metrics, and the middleware that checks the host of each request, counts it and completes its response."""

import time

from prometheus_client import CONTENT_TYPE_LATEST as KIND
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serve.auth import AllowedHosts
from vitrail.serve.limits import RequestRefused

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

__all__ = ["KIND", "ServiceMetrics"]


class ServiceMetrics:
    """Metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "vitrail_requests", "Requests by endpoint and status code", ["endpoint", "code"], registry=self.registry
        )
        self.seconds = Histogram(
            "vitrail_request_seconds",
            "Seconds from request to response",
            ["endpoint"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.images = Counter(
            "vitrail_images", "Images by model and outcome", ["model", "outcome"], registry=self.registry
        )
        self.batches = Histogram(
            "vitrail_batch_images", "Images per batch", ["model"], buckets=BATCH_BUCKETS, registry=self.registry
        )
        self.model_seconds = Counter(
            "vitrail_model_seconds", "Seconds of model time", ["model"], registry=self.registry
        )
        self.queued = Gauge("vitrail_queue_images", "Images waiting or running", registry=self.registry)
        self.reloads = Counter(
            "vitrail_reloads", "Model reloads by outcome", ["model", "outcome"], registry=self.registry
        )

    def record_batch(self, model: str, n_images: int, seconds: float) -> None:
        """Record a finished batch."""
        self.batches.labels(model).observe(n_images)
        self.model_seconds.labels(model).inc(seconds)

    def to_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


PAGE_PATHS = (
    *("/", "/page.css", "/page.js", "/masks.js", "/words.js", "/sounds.js", "/recorder.js", "/maps.js"),
    *("/find", "/find.js", "/openapi.json"),
)
KNOWN_PATHS = frozenset(
    (
        *PAGE_PATHS,
        "/predict",
        "/segment",
        "/embed",
        "/attention",
        "/spectrogram",
        "/search",
        "/models",
        "/healthz",
        "/readyz",
        "/metrics",
        "/reload",
    )
)
# The page loads scripts and styles from this server only, and connects to no other.
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    b"connect-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DEFAULT_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
]


class RequestMiddleware:
    """Outermost ASGI application. Unknown paths share one metrics label, so clients cannot create new labels."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics, hosts: AllowedHosts) -> None:
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, code = time.perf_counter(), 500

        async def counting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [*message.get("headers", []), *DEFAULT_HEADERS]
            await send(message)

        app = self.app
        try:
            self.hosts.check(scope)
        except RequestRefused as error:
            app = JSONResponse({"error": error.message}, error.status)
        try:
            await app(scope, receive, counting)
        finally:
            endpoint = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self.metrics.requests.labels(endpoint, str(code)).inc()
            self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - begin)
