"""What can be seen of a server over HTTP (http.py), all of it from the table of metrics.py:

/             the receipt, live: one page, with nothing from elsewhere (receipt.html)
/stats.json   what the page shows
/metrics      the same for Prometheus, or OpenMetrics where that is accepted
/health       200 while the server serves and takes writes; 503 with the reason where it cannot
              keep them
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from pion_server import __version__
from pion_server.commands.context import Server
from pion_server.net.http import Answer, HttpEndpoint
from pion_server.net.metrics import exposition, refusal, take

RECEIPT = Path(__file__).with_name("receipt.html").read_text(encoding="utf-8")


def _only(tag: str) -> str:
    """As a source of a content security policy: the one element of the page with that tag."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", RECEIPT, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_only('style')}",
        f"script-src {_only('script')}",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class Watch:
    """The pages about one server; for the server's loop. With a thousand tenants formatting takes
    a while, and is done elsewhere."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._endpoint = HttpEndpoint(
            {
                "/": self._receipt,
                "/stats.json": self._stats,
                "/metrics": self._metrics,
                "/health": self._health,
            }
        )
        self.listen = self._endpoint.listen
        self.close = self._endpoint.close

    async def _receipt(self, accept: str) -> Answer:
        headers = {"Content-Security-Policy": POLICY}
        return Answer(RECEIPT.encode(), "text/html; charset=utf-8", more=headers)

    async def _stats(self, accept: str) -> Answer:
        snapshot = await take(self._server)
        stats = {
            "version": __version__,
            "port": self._server.port,
            "uptime_seconds": int(snapshot.uptime_seconds),
            "refused": self._refused(),
            "tenants": snapshot.tenants,
        }
        return await asyncio.to_thread(_json, stats)

    async def _metrics(self, accept: str) -> Answer:
        snapshot = await take(self._server)
        return Answer(*await asyncio.to_thread(exposition, snapshot, accept))

    async def _health(self, accept: str) -> Answer:
        refused = self._refused()
        if refused:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return _json({"status": "refusing writes", "tenants": refused}, status)
        return _json({"status": "ok"})

    def _refused(self) -> dict[str, str]:
        """Why writes are refused, of each tenant whose are."""
        found = {tenant.name: refusal(tenant) for tenant in self._server.tenants}
        return {name: str(reason) for name, reason in found.items() if reason is not None}


def _json(value: object, status: int = HTTPStatus.OK) -> Answer:
    return Answer(json.dumps(value).encode() + b"\n", "application/json", status)
