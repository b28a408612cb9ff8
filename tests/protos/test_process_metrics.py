"""What a process counts, and the port that shows it: what Prometheus reads is what was counted."""

import asyncio
import math
import socket
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from structlog.testing import capture_logs

from paceline.process.metrics import Definition, Histogram, Kind, Meter
from paceline.process.metrics_port import MAX_REQUEST_BYTES, MetricsPort
from paceline.process.ports import PortError

LOOPBACK = "127.0.0.1"
BOUNDS = (0.1, 1.0, 10.0)
DEFINITIONS = (
    Definition("things_total", Kind.COUNTER, "Things.", ("name",)),
    Definition("all_total", Kind.COUNTER, "All."),
    Definition("level", Kind.GAUGE, "How much."),
    Definition("seconds", Kind.HISTOGRAM, "How long.", ("name",), BOUNDS),
)


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(BOUNDS)), max_size=40))
def test_a_histogram_counts_what_is_at_most_each_bound(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    copy = histogram.copy()
    histogram.observe(3.0)
    at_most = [sum(value <= bound for value in values) for bound in (*BOUNDS, math.inf)]
    assert list(accumulate(copy.counts)) == at_most
    assert copy.total == pytest.approx(sum(values))


def test_what_has_a_label_is_forgotten_with_it():
    meter = Meter(DEFINITIONS)
    for name in ("a", "b"):
        meter.add("things_total", 2, name)
        meter.observe("seconds", 1.0, name)
    meter.add("all_total", 1)
    meter.forget("name", "a")
    values = {reading.definition.name: list(reading.values) for reading in meter.read()}
    assert values == {"things_total": [("b",)], "all_total": [()], "level": [()], "seconds": [("b",)]}


def test_what_begins_is_shown_with_nothing_in_it():
    """So that its first change is seen as one."""
    meter = Meter(DEFINITIONS)
    meter.begin("name", "a")
    values = {reading.definition.name: reading.values for reading in meter.read()}
    assert values["things_total"] == {("a",): 0}
    assert values["seconds"]["a",].counts == [0, 0, 0, 0]
    assert meter.total("things_total") == 0


@pytest.fixture
async def shown():
    """A meter, and the port where it is shown."""
    meter = Meter(DEFINITIONS)
    port = MetricsPort(meter.read)
    number = await port.listen(LOOPBACK, 0)
    yield meter, number
    port.close()


async def ask(number, request):
    """Send bytes; returns all that is answered."""
    reader, writer = await asyncio.open_connection(LOOPBACK, number)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def get(number, *headers, path="/metrics"):
    """Return the status line and the body."""
    lines = [f"GET {path} HTTP/1.1", "Host: here", *headers, "", ""]
    head, _, body = (await ask(number, "\r\n".join(lines).encode())).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    return head.split(b"\r\n")[0].decode(), body.decode()


def samples(families):
    """Return values by name and labels."""
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


@pytest.mark.parametrize(
    ("accept", "read"),
    [
        ("text/plain", parser.text_string_to_metric_families),
        ("application/openmetrics-text; version=1.0.0", openmetrics_parser.text_string_to_metric_families),
    ],
    ids=["text", "openmetrics"],
)
async def test_prometheus_reads_what_was_counted(shown, accept, read):
    meter, number = shown
    meter.add("things_total", 3, 'a"b\\c\nd')
    meter.add("all_total", 7)
    for value in (0.1, 5.0, 50.0):
        meter.observe("seconds", value, "x")
    status, body = await get(number, f"Accept: {accept}")
    found = samples(read(body))
    assert status == "HTTP/1.1 200 OK"
    assert found["paceline_things_total", 'a"b\\c\nd'] == 3
    assert found["paceline_all_total",] == 7
    assert [found["paceline_seconds_bucket", bound, "x"] for bound in ("0.1", "1.0", "10.0", "+Inf")] == [1, 1, 2, 3]
    assert found["paceline_seconds_sum", "x"] == pytest.approx(55.1)
    assert found["process_resident_memory_bytes",] > 0


async def test_only_metrics_are_there(shown):
    """And only to be read."""
    _, number = shown
    assert (await get(number, path="/"))[0].endswith("404 Not Found")
    assert (await get(number, path="/metrics?name=x"))[0].endswith("200 OK")
    assert b"405" in await ask(number, b"POST /metrics HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01\x02\x00\r\n\r\n", b"\r\n\r\n", b"x" * (2 * MAX_REQUEST_BYTES), b"GET /metrics\r\n\r\n"]
)
async def test_whatever_is_sent_does_no_harm(shown, sent):
    _, number = shown
    reader, writer = await asyncio.open_connection(LOOPBACK, number)
    writer.write(sent)
    writer.close()
    del reader
    assert (await get(number))[0].endswith("200 OK")


async def test_those_that_say_nothing_are_few(shown):
    _, number = shown
    silent = [await asyncio.open_connection(LOOPBACK, number) for _ in range(17)]
    assert await asyncio.wait_for(silent[-1][0].read(), 30) == b""
    for _, writer in silent:
        writer.close()
    while b"200" not in await ask(number, b"GET /metrics HTTP/1.1\r\n\r\n"):
        await asyncio.sleep(0.01)


async def test_a_mistake_in_what_is_read_ends_nothing():
    readings = iter([lambda: [] / 0, list])
    port = MetricsPort(lambda: next(readings)())
    number = await port.listen(LOOPBACK, 0)
    with capture_logs() as lines:
        assert (await get(number))[0].endswith("500 Internal Server Error")
    assert [line["event"] for line in lines] == ["metrics_failed"]
    assert (await get(number))[0].endswith("200 OK")
    port.close()


async def test_a_port_in_use_is_refused_in_one_sentence():
    with socket.create_server((LOOPBACK, 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"^cannot listen on 127\.0\.0\.1:{number}: .*in use"):
            await MetricsPort(list).listen(LOOPBACK, number)
