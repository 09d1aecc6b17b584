"""What Prometheus is told."""

from prometheus_client import CONTENT_TYPE_LATEST as KIND
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)

__all__ = ["KIND", "Metrics"]


class Metrics:
    """The counters of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "vitrail_requests",
            "Requests by what was asked and how it ended",
            ["endpoint", "code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "vitrail_request_seconds",
            "From a request to its answer",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.pictures = Counter(
            "vitrail_pictures",
            "Pictures by model and whether they could be read",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.batches = Histogram(
            "vitrail_batch_pictures",
            "Pictures that a model answered together",
            ["model"],
            buckets=BATCHES,
            registry=self.registry,
        )
        self.computing = Counter(
            "vitrail_model_seconds", "Time that a model took for its batches", ["model"], registry=self.registry
        )
        self.waiting = Gauge("vitrail_queue_pictures", "Pictures taken and not answered", registry=self.registry)
        self.reloads = Counter("vitrail_reloads", "Models opened anew", ["model", "outcome"], registry=self.registry)

    def batch(self, model: str, pictures: int, seconds: float) -> None:
        """A batch that was answered."""
        self.batches.labels(model).observe(pictures)
        self.computing.labels(model).inc(seconds)

    def text(self) -> bytes:
        """All of them, in Prometheus' form."""
        return generate_latest(self.registry)
