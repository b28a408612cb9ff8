"""The port where Prometheus reads a process's metrics: `GET /metrics` over HTTP, and nothing else.

What is shown is read on the event loop and written as text on another thread, which imports prometheus-client when
somebody looks for the first time: a start does not wait for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import structlog

from paceline.process.metrics import Histogram, Kind, Reading
from paceline.process.ports import PortError

PREFIX = "paceline_"
MAX_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
_MAX_CONNECTIONS = 16
_STATUS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}

_log = structlog.get_logger(__name__)


class MetricsPort:
    """`read` gives the metrics as they are now; it is called on the event loop."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read
        self._server: asyncio.Server | None = None
        self._num_connections = 0
        self._rendering = asyncio.Lock()

    async def listen(self, host: str, port: int | None) -> int | None:
        """Answer from now on; port 0 takes a free one, None none at all. Returns its number, raises PortError."""
        if port is None:
            return None
        try:
            self._server = await asyncio.start_server(self._answer, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise PortError(host, port, error.strerror or str(error), "--metrics-port") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= _MAX_CONNECTIONS:
                with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(_REQUEST_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._response(head.decode("latin-1")))
                    async with asyncio.timeout(_REQUEST_S):
                        await writer.drain()
        finally:
            self._num_connections -= 1
            writer.close()

    async def _response(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        if rest.split(" ")[0].partition("?")[0] != "/metrics":
            return _message(404, "text/plain", b"GET /metrics\n")
        if method != "GET":
            return _message(405, "text/plain", b"GET /metrics\n")
        fields = (line.partition(":") for line in lines)
        accept = next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")
        try:
            async with self._rendering:
                text, kind = await asyncio.to_thread(_render, list(self._read()), accept)
        except Exception:  # whoever is served goes on being served
            _log.exception("metrics_failed")
            return _message(500, "text/plain", b"the log says more\n")
        return _message(200, kind, text)


def _message(status: int, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def _render(readings: list[Reading], accept: str) -> tuple[bytes, str]:
    """Return the text that a scraper takes, and its content type."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

    kinds = {
        Kind.GAUGE: GaugeMetricFamily,
        Kind.COUNTER: CounterMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }

    class ReadingCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            for reading in readings:
                definition = reading.definition
                family = kinds[definition.kind](PREFIX + definition.name, definition.meaning, labels=definition.labels)
                for labels, value in reading.values.items():
                    if isinstance(value, Histogram):
                        family.add_metric(labels, _buckets(value), value.total)
                    else:
                        family.add_metric(labels, value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingCollector())
    ProcessCollector(registry=registry)
    encode, kind = choose_encoder(accept)
    return encode(registry), kind


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Return how many values are at most each bound, the last of which is infinite."""
    buckets, count = [], 0
    for bound, number in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += number
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), count))
    return buckets
