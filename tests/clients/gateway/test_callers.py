"""Who calls: keys of tenants, certificates, origins of pages; and requests that are sent again with their key."""

import asyncio
import ssl

import httpx2
import pytest

from both_sides.certificates import Authority
from edge_rig.edge_server import serve_edge, wait_until
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL, encode
from gateway_rig import ASKING, CHAT, serve_gateway
from paceline.plan.values import FinishReason
from paceline.process.callers import Caller, Role
from paceline_client import AsyncClient, Limits, OverloadedError
from paceline_client.testing import FakeServer, Hold, say
from paceline_gateway import process
from paceline_gateway.clients import Clients
from paceline_scheduler.access.tokens import Token
from paceline_scheduler.api.servicer_access import Access

STREAMED = ASKING | {"stream": True}
KEYED = {"idempotency-key": "k-1"}


def find(secret):
    """Tokens are the names of tenants."""
    if secret not in ("blue", "red"):
        return None
    return Token(b"", Caller(secret, frozenset({Role.CLIENT}), secret))


def bearer(token):
    return {"authorization": f"Bearer {token}"}


async def test_two_tenants_are_never_mixed_and_a_stranger_gets_nothing():
    backend = ScriptedBackend(MODEL)
    async with serve_edge(backend, access=Access(find)) as edge, serve_gateway(edge.address) as gateway:
        asking = [asyncio.create_task(gateway.post(CHAT, ASKING, bearer(name))) for name in ("blue", "red")]
        await wait_until(lambda: len(backend.asked.requests) == 2)
        for handle, request in backend.asked.requests.items():
            backend.step({handle: encode(request.key.tenant)}, {handle: FinishReason.LENGTH})
        texts = [(await each).json()["choices"][0]["message"]["content"] for each in asking]
        assert texts == ["blue", "red"]
        for headers in ({}, bearer("green")):
            refused = await gateway.post(CHAT, ASKING | {"model": "tiny"}, headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await gateway.http.get("/ready")).status_code == 200
        assert len(gateway.gateway._clients) == 2


async def test_clients_of_the_scheduler_are_few_and_end_when_nobody_uses_them():
    async with FakeServer(say("hi")) as server:
        made = []

        def connect(bearer):
            made.append(bearer)
            return AsyncClient(server.target, token=bearer)

        clients = Clients(connect, max_clients=2)
        async with clients.of("a") as a, clients.of("a") as same, clients.of("b"):
            assert a is same
            with pytest.raises(OverloadedError):
                await clients.of("c").__aenter__()
        async with clients.of("b"), clients.of("c"):
            assert made == ["a", "b", "c"]
        async with clients.of("a"):
            assert made == ["a", "b", "c", "a"]
        await clients.close()


async def test_a_key_has_so_many_requests_at_once(monkeypatch):
    monkeypatch.setattr(process, "_LIMITS", Limits(max_concurrent_requests=1))
    async with FakeServer([Hold()]) as server, serve_gateway(server.target) as gateway:
        await gateway.ask(STREAMED)
        await server.seen_that(lambda seen: seen.requests)
        refused = await gateway.post(CHAT, ASKING)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


async def kept(backend, gateway, body=STREAMED, headers=KEYED):
    """A keyed request that runs, and its answer to come."""
    asking = asyncio.create_task(gateway.post(CHAT, body, headers))
    num_before = len(backend.asked.requests)
    await wait_until(lambda: len(backend.asked.requests) > num_before)
    return asking


async def test_another_body_with_the_key_of_one_that_runs_is_a_conflict():
    backend = ScriptedBackend(MODEL)
    async with serve_edge(backend) as edge, serve_gateway(edge.address) as gateway:
        first = await kept(backend, gateway)
        refused = await gateway.post(CHAT, STREAMED | {"seed": 5}, KEYED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
        backend.step({1: encode("b")}, {1: FinishReason.LENGTH})
        assert "[DONE]" in (await first).text


async def test_a_key_whose_client_has_left_is_computed_again():
    backend = ScriptedBackend(MODEL)
    async with serve_edge(backend) as edge, serve_gateway(edge.address) as gateway:
        first = await kept(backend, gateway)
        first.cancel()
        await wait_until(lambda: backend.asked.cancelled)
        again = await kept(backend, gateway)
        backend.step({max(backend.asked.requests): encode("b")}, {max(backend.asked.requests): FinishReason.LENGTH})
        assert '"content":"b"' in (await again).text


async def test_https_has_the_certificate_that_the_folder_holds_now(tmp_path):
    authority = Authority()
    folder = authority.mount(tmp_path / "tls", "paceline://client/blue")
    async with FakeServer() as server, serve_gateway(server.target, "--tls-dir", str(folder)) as gateway:
        trusting = ssl.create_default_context(cafile=folder / "ca.crt")

        async def serial():
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port, ssl=trusting)
            shown = writer.get_extra_info("peercert")["serialNumber"]
            writer.close()
            await writer.wait_closed()
            return shown

        before = await serial()
        async with httpx2.AsyncClient(verify=trusting) as http:
            assert (await http.get(f"https://127.0.0.1:{gateway.gateway.port}/health")).status_code == 200
        authority.mount(folder, "paceline://client/blue")
        assert await serial() != before


async def test_pages_of_named_origins_alone_may_call():
    origin = "https://chat.example.com"
    async with FakeServer(say("hi")) as server, serve_gateway(server.target, "--cors-origins", origin) as gateway:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        allowed = await gateway.http.options(CHAT, headers={"origin": origin} | asks)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        answered = await gateway.post(CHAT, ASKING, {"origin": origin})
        assert answered.headers["access-control-allow-origin"] == origin
        other = await gateway.http.options(CHAT, headers={"origin": "https://evil.example"} | asks)
        assert "access-control-allow-origin" not in other.headers
