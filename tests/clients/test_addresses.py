"""Where a target leads to: lists, and names that are looked up again."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client import AsyncClient, Keepalive, Limits, Retry, errors
from paceline_client.address_picker import AddressPicker
from paceline_client.addresses import Addresses, may_be_followed, resolve_with_system
from paceline_client.connection import Connection
from paceline_client.testing import FakeServer

ADDRESSES = ("a:1", "b:1", "c:1")


class Names:
    """A resolver that is told what to answer."""

    def __init__(self, *answers):
        self._answers = list(answers)

    async def resolve(self, _name, _port):
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("target", "known"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,a:1", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        (("[::1]:5", "unix:/run/paceline"), ("[::1]:5", "unix:/run/paceline")),
    ],
)
def test_a_target_lists_addresses(target, known):
    assert Addresses(target).known == known


@pytest.mark.parametrize(
    ("target", "known"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("host:7", "host:7"),
        ("[::1]:7", "[::1]:7"),
        ("unix:/run/paceline", "unix:/run/paceline"),
    ],
)
def test_a_host_without_a_port_gets_the_usual_one(target, known):
    """gRPC itself would dial port 443."""
    assert Addresses(target, default_port=50051).known == (known,)


async def test_a_name_without_a_port_gets_the_usual_one():
    addresses = Addresses("dns:///pace.line", Names(("10.0.0.1",)).resolve, default_port=50051)
    await addresses.look()
    assert addresses.known == ("10.0.0.1:50051",)


def test_a_url_is_refused_with_what_to_write_instead():
    """A resolver's words about it would help nobody."""
    with pytest.raises(
        errors.InvalidRequestError, match=r"'http://pace:1/v1' is a URL: write 'pace:1', without http://"
    ):
        Addresses("http://pace:1/v1")


@pytest.mark.parametrize(
    ("address", "named_by", "is_followed"),
    [
        ("10.0.0.2:1", "10.0.0.1:1", True),
        ("pace.line:1", "10.0.0.1:1", True),
        ("[fd00::2]:1", "pace.line:1", True),
        ("127.0.0.1:2", "localhost:1", True),
        ("localhost:2", "127.0.0.1:1", True),
        ("[::1]:2", "unix:/run/paceline", True),
        ("127.0.0.1:2", "10.0.0.1:1", False),
        ("0.0.0.0:2", "pace.line:1", False),
        ("localhost:2", "pace.line:1", False),
        ("unix:/run/other", "localhost:1", False),
        ("unix:5", "localhost:1", False),
        ("dns:///pace.line:1", "localhost:1", False),
        ("pace.line", "localhost:1", False),
        ("pace.line:0", "localhost:1", False),
        ("pace.line:70000", "localhost:1", False),
        ("-x:1", "localhost:1", False),
        ("a:1,b:1", "localhost:1", False),
        ("", "localhost:1", False),
    ],
)
def test_only_a_host_and_port_that_mean_the_same_here_are_followed(address, named_by, is_followed):
    """What means the server's own machine is followed only on that machine."""
    assert may_be_followed(address, named_by) is is_followed


async def test_a_name_stands_for_all_its_addresses():
    addresses = Addresses("first:1,dns:///pace.line:50051", Names(("10.0.0.1", "::2")).resolve)
    await addresses.look()
    await asyncio.sleep(0)
    assert addresses.known == ("first:1", "10.0.0.1:50051", "[::2]:50051")
    assert [addresses.name_of(address) for address in addresses.known] == [None, "pace.line", "pace.line"]


async def test_a_name_is_looked_up_again_and_keeps_its_last_answer():
    addresses = Addresses("dns:///x:1", Names(("10.0.0.1",), OSError(-3, "Try again"), ("10.0.0.2",)).resolve)
    await addresses.look()
    assert (addresses.known, addresses.trouble) == (("10.0.0.1:1",), "")
    await addresses.look()
    await asyncio.sleep(0)
    assert (addresses.known, addresses.trouble) == (("10.0.0.1:1",), "cannot resolve x: Try again")
    await addresses.look()
    await asyncio.sleep(0)
    assert (addresses.known, addresses.trouble) == (("10.0.0.2:1",), "")
    assert addresses.name_of("10.0.0.1:1") == "x"  # for a connection that is still there


async def test_a_resolver_that_hangs_holds_up_nobody_who_knows_an_address():
    hanging = asyncio.Event()

    async def resolve(_name, _port):
        await hanging.wait()
        return ()

    addresses = Addresses("a:1,dns:///x:1", resolve)
    await addresses.look()
    await addresses.look()
    await asyncio.sleep(0)
    assert (addresses.known, addresses.trouble) == (("a:1",), "cannot resolve x: no answer in time")
    await addresses.close()


async def test_closing_ends_a_look_that_somebody_waits_for():
    async def resolve(_name, _port):
        await asyncio.Event().wait()
        return ()

    addresses = Addresses("dns:///x:1", resolve)
    connection = Connection(addresses, dial=pytest.fail, retry=Retry(), keepalive=Keepalive(), limits=Limits())
    waiting = asyncio.create_task(connection.endpoint(connect_seconds=3600))
    for _ in range(5):
        await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(errors.ClientClosedError):
        await waiting


def test_a_look_up_that_hangs_does_not_hold_up_the_exit(monkeypatch):
    """It runs in a thread that nobody waits for; what it finds in the end is for nobody."""
    released, threads = threading.Event(), []

    def hang(*_args, **_options):
        threads.append(threading.current_thread())
        released.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def look():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(resolve_with_system("pace.line", 1), 0.01)

    asyncio.run(look())
    [thread] = threads
    assert thread.daemon
    assert thread.is_alive()
    released.set()
    thread.join()


async def test_a_client_follows_a_name():
    async with FakeServer() as server, AsyncClient(f"dns:///localhost:{server.port}") as client:
        assert [model.name for model in await client.list_models()] == ["fake"]


async def test_what_the_system_cannot_look_up_is_an_error_of_its_own():
    assert await resolve_with_system("127.0.0.1", 1) == ("127.0.0.1",)
    with pytest.raises(OSError, match="label"):
        await resolve_with_system("x" * 70, 1)


async def test_a_name_that_leads_nowhere_is_the_reason():
    unknown = OSError(-2, "Name or service not known")
    addresses = Addresses("dns:///pace.line:1", Names(unknown, unknown).resolve)
    connection = Connection(addresses, dial=pytest.fail, retry=Retry(), keepalive=Keepalive(), limits=Limits())
    with pytest.raises(errors.ConnectFailedError) as caught:
        await connection.endpoint(connect_seconds=0.05)
    assert str(caught.value) == ("cannot reach dns:///pace.line:1; cannot resolve pace.line: Name or service not known")
    await connection.close()


# The order in which they are tried


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["failed", "served", "broke", "went_away", "referred_to", "next"]),
            st.sampled_from(ADDRESSES),
        ),
        max_size=30,
    )
)
def test_a_round_tries_each_address_once(history):
    picker = AddressPicker(Retry())
    for now_s, (what, address) in enumerate(history):
        match what:
            case "failed" | "broke":
                getattr(picker, what)(address, now_s)
            case "went_away":
                picker.went_away(address, ADDRESSES, now_s)
            case "next":
                picker.next_address(ADDRESSES)
            case _:
                getattr(picker, what)(address)
    picker.end_round(len(history))
    tried = []
    while (address := picker.next_address(ADDRESSES)) is not None:
        tried.append(address)
        picker.failed(address, len(history))
        picker.referred_to("a:1")
    assert sorted(tried) == sorted(ADDRESSES)
    picker.end_round(len(history))
    assert picker.resume_at_s > len(history)


def test_the_shortest_pause_that_a_server_asked_for_is_kept():
    """It counts from the last refusal; one address that only refused the connection asks for nothing."""
    picker = AddressPicker(Retry(draw=lambda: 0.5))
    for address, asked_seconds in (("a:1", 3.0), ("b:1", 2.0)):
        picker.failed(address, 10.0, asked_seconds=asked_seconds)
    picker.end_round(10.0)
    assert picker.resume_at_s == 12.0
    picker.failed("a:1", 12.0, asked_seconds=3.0)
    picker.failed("b:1", 12.0)
    picker.end_round(12.0)
    assert picker.resume_at_s == pytest.approx(12.15)
