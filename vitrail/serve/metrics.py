"""Prometheus metrics and the middleware that records them."""

import time

from prometheus_client import CONTENT_TYPE_LATEST as KIND
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
            "vitrail_pictures", "Images by model and outcome", ["model", "outcome"], registry=self.registry
        )
        self.batches = Histogram(
            "vitrail_batch_pictures", "Images per batch", ["model"], buckets=BATCH_BUCKETS, registry=self.registry
        )
        self.model_seconds = Counter(
            "vitrail_model_seconds", "Seconds of model time", ["model"], registry=self.registry
        )
        self.queued = Gauge("vitrail_queue_pictures", "Images waiting or running", registry=self.registry)
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


PAGE_PATHS = ("/", "/page.css", "/page.js", "/maps.js", "/openapi.json")
KNOWN_PATHS = frozenset(
    (*PAGE_PATHS, "/predict", "/embed", "/attention", "/models", "/healthz", "/readyz", "/metrics", "/reload")
)
DEFAULT_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class MetricsMiddleware:
    """ASGI middleware that records requests. Unknown paths share one label, so clients cannot create new labels."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app, self.metrics = app, metrics

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

        try:
            await self.app(scope, receive, counting)
        finally:
            endpoint = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self.metrics.requests.labels(endpoint, str(code)).inc()
            self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - begin)
