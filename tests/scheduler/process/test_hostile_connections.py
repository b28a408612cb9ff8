"""What strangers may do to a scheduler's ports: its memory stays bounded, and others are served meanwhile."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from both_sides.certificates import Authority
from client_loads.raw_http2 import RawConnection
from edge_rig.edge_server import wait_until
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.api.servicer_guard import MAX_MESSAGE_BYTES
from service_processes.measured import scheduler_of, simulated_executor

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What a connection may do once it is made is the same with certificates as without.
each_port_in_test_all = pytest.mark.parametrize(
    "target", ["plain", pytest.param("tls", marks=pytest.mark.slow)], indirect=True, scope="module"
)

GENEROUS_S = 120
NUM_CONNECTIONS = 1000
NUM_STREAMS, MAX_STREAMS = 3000, 1024
# What each may cost, and what a process may need anyway that had served one request before.
MAX_KB_EACH, MAX_KB = 64, 32 * 1024
GENERATE = "/paceline.v1.InferenceService/Generate"
HALVES = {
    "plain": (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\6\4\0\0\0\0\0\0"),
    # Nothing, the header of a record, and the beginning of a ClientHello of 512 bytes.
    "tls": (b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
}


@dataclass(frozen=True)
class Target:
    """A scheduler process with a simulated executor, and how a client of it connects."""

    process: asyncio.subprocess.Process
    port: int
    halves: tuple
    credentials: grpc.ChannelCredentials | None = None
    tls: ssl.SSLContext | None = None

    def channel(self):
        """A connection of its own, with a token where one is asked for."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self.credentials is None:
            return grpc.aio.insecure_channel(f"localhost:{self.port}", options=options)
        return grpc.aio.secure_channel(f"localhost:{self.port}", self.credentials, options=options)

    @property
    def rss_kb(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    @property
    def num_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - only how many there are


@contextlib.asynccontextmanager
async def without_security():
    """Run both processes as they are on one machine."""
    async with simulated_executor() as address, scheduler_of(address) as (process, ready):
        yield Target(process, ready["port"], HALVES["plain"])


@contextlib.asynccontextmanager
async def with_security(folder):
    """Run both processes with certificates; clients have a token."""
    authority = Authority()
    executor, scheduler = (
        str(authority.mount(folder / role, f"paceline://{role}")) for role in ("executor", "scheduler")
    )
    tokens = folder / "tokens"
    tokens.write_text(json.dumps({"hash": f"sha256:{sha256(b'secret').hexdigest()}", "tenant": "a"}))
    roots = folder / "scheduler" / "ca.crt"
    tls = ssl.create_default_context(cafile=roots)
    tls.set_alpn_protocols(["h2"])
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(roots.read_bytes()), grpc.access_token_call_credentials("secret")
    )
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(simulated_executor("--tls-dir", executor))
        options = ("--tls-dir", scheduler, "--tokens", str(tokens))
        process, ready = await stack.enter_async_context(scheduler_of(address, *options))
        yield Target(process, ready["port"], HALVES["tls"], credentials, tls)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.slow)]
)
async def target(request, tmp_path_factory):
    """Both processes, once for all tests of this module."""
    security = with_security(tmp_path_factory.mktemp("hostile")) if request.param == "tls" else without_security()
    async with security as target:
        async with target.channel() as channel:
            assert await generate(channel) == 20
        yield target


async def generate(channel, *, metadata=None, text="Hello"):
    """How many of 20 tokens a request gets."""
    request = pb.GenerateRequest(text=text, stopping={"max_tokens": 20, "ignore_eos": True})
    call = InferenceServiceStub(channel).Generate(request, metadata=metadata)
    return sum([len(response.delta.token_ids) async for response in call])


@contextlib.contextmanager
def half_open(target):
    """Keep many connections open, each with the beginning of what a client says."""
    with contextlib.ExitStack() as strangers:
        for number in range(NUM_CONNECTIONS):
            connection = strangers.enter_context(socket.create_connection(("127.0.0.1", target.port)))
            connection.sendall(target.halves[number % len(target.halves)])
        yield


async def test_a_thousand_half_open_connections_cost_little_and_others_are_served(target):
    before_kb, before_files = target.rss_kb, target.num_files
    async with target.channel() as channel:
        assert await generate(channel) == 20
        with half_open(target):
            assert await generate(channel) == 20
            async with target.channel() as another:
                assert await generate(another) == 20
            assert target.rss_kb - before_kb < MAX_KB + NUM_CONNECTIONS * MAX_KB_EACH
        assert await generate(channel) == 20
    await wait_until(lambda: target.num_files < before_files + 20, GENEROUS_S)


@pytest.mark.soak
async def test_half_open_connections_are_closed_by_themselves(target):
    """But those that have said all that HTTP/2 asks for."""
    before_files = target.num_files
    with half_open(target):
        await wait_until(lambda: target.num_files < before_files + 20 + NUM_CONNECTIONS // 3, GENEROUS_S)


@each_port_in_test_all
@pytest.mark.parametrize("begun", [b"", b"\0\xff\xff\xff\xffx"], ids=["nothing", "4 GiB"])
async def test_streams_that_are_left_open_are_refused_beyond_a_number_and_take_no_memory(target, begun):
    """By HTTP/2 itself. Their messages never come, of whatever length they announce them."""
    before_kb = target.rss_kb
    async with target.channel() as channel:
        with RawConnection("localhost", target.port, target.tls) as stranger:
            num_refused = await asyncio.to_thread(stranger.open_streams, GENERATE, NUM_STREAMS, begun)
            assert num_refused >= NUM_STREAMS - MAX_STREAMS
            assert await generate(channel) == 20
            assert target.rss_kb - before_kb < MAX_KB + MAX_STREAMS * MAX_KB_EACH
        assert await generate(channel) == 20


@each_port_in_test_all
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"metadata": (("x-large", "x" * 64 * 1024),)}, "metadata"),
        ({"text": "x" * (MAX_MESSAGE_BYTES + 1)}, "message larger"),
    ],
    ids=["metadata", "message"],
)
async def test_what_is_too_large_is_refused_and_its_connection_lives(target, sent, reason):
    before_kb = target.rss_kb
    async with target.channel() as channel:
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await generate(channel, **sent)
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason in refusal.value.details().lower()
        assert await generate(channel) == 20
    assert target.rss_kb - before_kb < MAX_KB + 4 * MAX_MESSAGE_BYTES // 1024
