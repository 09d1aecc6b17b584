"""Every request is counted and timed, and its answer told not to be taken for something else."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serve.metrics import Metrics

OF_PAGE = ("/", "/page.css", "/page.js", "/maps.js", "/openapi.json")
KNOWN = frozenset(
    (*OF_PAGE, "/predict", "/embed", "/attention", "/models", "/healthz", "/readyz", "/metrics", "/reload")
)
ALWAYS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class Counted:
    """Around the application. Paths that do not exist are counted together: a stranger cannot make up new ones."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, code = time.perf_counter(), 500

        async def counting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [*message.get("headers", []), *ALWAYS]
            await send(message)

        try:
            await self.app(scope, receive, counting)
        finally:
            endpoint = scope["path"] if scope["path"] in KNOWN else "other"
            self.metrics.requests.labels(endpoint, str(code)).inc()
            self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - begin)
