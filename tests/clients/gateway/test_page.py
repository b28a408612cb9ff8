"""The page at `/` and what it asks: small, whole, of one origin; the fleet for whoever is an operator."""

from dataclasses import replace

import pytest

from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL
from gateway_rig import serve_gateway
from paceline.plan.values import Claim
from paceline.process.callers import Caller, Role
from paceline_client.testing import FakeServer
from paceline_scheduler.access.tokens import Token
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.observers.steps import StepTotals

MAX_BYTES = 60 * 1024
FILES = {
    "/": "text/html; charset=utf-8",
    "/page/page.js": "text/javascript; charset=utf-8",
    "/page/page.css": "text/css; charset=utf-8",
    "/page/icon.svg": "image/svg+xml",
}


def find(secret):
    """Tokens are the names of roles."""
    return Token(b"", Caller(secret, frozenset({Role(secret)}), secret)) if secret in ("client", "operator") else None


async def test_the_page_is_small_and_runs_only_what_is_in_its_files():
    async with FakeServer() as server, serve_gateway(server.target) as gateway:
        sizes = {}
        for path, kind in FILES.items():
            answer = await gateway.http.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
            sizes[path] = len(answer.content)
        assert 1000 < sum(sizes.values()) <= MAX_BYTES
        page = (await gateway.http.get("/")).text
        assert 'src="page/page.js"' in page
        assert "<script>" not in page
        assert "style=" not in page
        assert (await gateway.http.get("/page/__init__.py")).status_code == 404


async def test_a_browser_loads_a_file_once_and_may_ask_for_its_head():
    async with FakeServer() as server, serve_gateway(server.target) as gateway:
        first = await gateway.http.get("/page/page.js")
        again = await gateway.http.get("/page/page.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert (await gateway.http.get("/", headers={"if-none-match": first.headers["etag"]})).status_code == 200
        head = await gateway.http.head("/page/page.js")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(first.content))
        assert (await gateway.http.post("/")).status_code == 405


async def test_what_becomes_of_output_is_text():
    """Whoever writes HTML into the page from its script has to change this."""
    async with FakeServer() as server, serve_gateway(server.target) as gateway:
        script = (await gateway.http.get("/page/page.js")).text
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "localStorage"):
        assert way not in script, way


async def test_an_operator_sees_the_fleet_and_nobody_else():
    backend = ScriptedBackend(MODEL)
    async with (
        serve_edge(backend, access=Access(find)) as edge,
        serve_gateway("localhost:1", "--admin-target", edge.address) as gateway,
    ):
        found = await gateway.http.get("/fleet", headers={"authorization": "Bearer operator"})
        assert found.status_code == 200, found.text
        assert found.json().keys() == {"scheduler_id", "num_waiting_requests", "executors"}
        assert found.headers["cache-control"] == "no-store"
        refused = await gateway.http.get("/fleet", headers={"authorization": "Bearer client"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert (await gateway.http.get("/fleet")).status_code == 401


async def test_the_fleet_is_that_of_the_scheduler_which_drives_it():
    ready = ExecutorStatus("10.0.0.1:50061", 3, 7, 2, "tiny", 1, 100, 60, 10, 30, 0, 3, 4, 2, "", StepTotals())
    serving, standing_by = ScriptedBackend(MODEL), ScriptedBackend(MODEL)
    serving.known_executors = (ready,)
    standing_by.known_executors = (
        replace(ready, state=2, num_used_blocks=0, holder=Claim(3, "other", "10.0.0.9:50051")),
    )
    async with serve_edge(serving) as one, serve_edge(standing_by) as other:
        for admin in (f"{other.address},{one.address}", f"{one.address},{other.address}"):
            async with serve_gateway("localhost:1", "--admin-target", admin) as gateway:
                (executor,) = (await gateway.http.get("/fleet")).json()["executors"]
            shown = [executor[name] for name in ("state", "num_running_requests", "num_blocks", "num_used_blocks")]
            assert shown == ["ready", 1, 100, 30]
        async with serve_gateway("localhost:1", "--admin-target", other.address) as gateway:
            (executor,) = (await gateway.http.get("/fleet")).json()["executors"]
        assert executor["state"] == "syncing"


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [(["localhost:1", "--admin-target", "localhost:2"], 503, "cannot reach localhost:2"), (["unix:a"], 400, "--admin")],
    ids=["nobody there", "no port"],
)
async def test_a_fleet_that_cannot_be_asked_says_why(options, status, sentence):
    async with serve_gateway(*options) as gateway:
        answer = await gateway.http.get("/fleet")
    assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (status, True), answer.text
