"""The file of tokens: what a line may say, and how it is read again while calls come in."""

import asyncio
import contextlib
import hashlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from edge_rig.edge_server import wait_until
from paceline.process.callers import Role
from paceline_scheduler.access import tokens
from paceline_scheduler.access.tenant_limits import TenantBounds, TenantLimits
from paceline_scheduler.access.tokens import TokenFile, parse_tokens
from paceline_scheduler.errors import TokenFileError


def line(secret, **fields):
    return json.dumps({"hash": f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}", **fields}) + "\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text(line("one", tenant="blue"))
    return path


@pytest.fixture
async def file(path, monkeypatch):
    """That file, watched; `removed` are the digests that were reported."""
    monkeypatch.setattr(tokens, "RELOAD_S", 0.01)
    file = TokenFile(path)
    file.removed = []
    file.on_change(file.removed.append)
    watching = asyncio.create_task(file.watch())
    yield file
    watching.cancel()


def test_a_line_says_whose_a_token_is():
    lines = parse_tokens(
        line("a", tenant="blue")
        + "\n"
        + line("b", role="operator", name="ops")
        + line("c", role="operator", tenant="x")
    )
    blue, ops, both = lines.tokens
    assert (blue.caller.roles, blue.caller.tenant) == ({Role.CLIENT}, "blue")
    assert blue.caller.name == f"token {hashlib.sha256(b'a').hexdigest()[:8]}"
    assert (ops.caller.roles, ops.caller.tenant, ops.caller.name) == ({Role.OPERATOR}, None, "ops")
    assert (both.caller.roles, both.caller.tenant) == ({Role.OPERATOR, Role.CLIENT}, "x")


async def test_limits_are_those_of_a_tenant_whichever_line_says_them(file, path):
    path.write_text(line("one", tenant="blue") + line("two", tenant="blue", limits={"max_num_streams": 3}))
    await wait_until(lambda: file.bounds.own)
    assert file.bounds == TenantBounds({"blue": TenantLimits(max_num_streams=3)})
    assert file.removed == [frozenset()]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense\n", "line 1: "),
        ("\n[1]\n", "line 2: has to be a JSON object"),
        (line("a", tenant=3), "line 1: tenant has to be a text"),
        (line("a"), "line 1: tenant is missing"),
        (line("a", tenant=""), "line 1: tenant has to have 1 to 128 bytes"),
        (line("a", tenant="x" * 129), "line 1: tenant has to have 1 to 128 bytes"),
        (line("a", tenant="\ud800"), "line 1: .*surrogates not allowed"),
        (line("a", tenant="x", limits=3), "line 1: limits has to be a JSON object"),
        (line("a", tenant="x", limits={"speed": 3}), "line 1: limits: 'speed' is not known"),
        (line("a", tenant="x", limits={"max_num_streams": 0}), "line 1: limits: max_num_streams has to be a number"),
        (line("a", tenant="x", limits={"max_num_streams": True}), "line 1: limits: max_num_streams has to be a number"),
        (line("a", role="operator", limits={"max_num_streams": 1}), "line 1: limits are of a tenant"),
        (
            line("a", tenant="x", limits={"max_num_streams": 1}) + line("b", tenant="x", limits={"max_num_streams": 2}),
            "line 2: limits differ from those of this tenant above",
        ),
        (line("a", tenant="x", role="root"), "line 1: role is 'root', has to be client or operator"),
        (line("a", tenant="x", tenat="y"), "line 1: 'tenat' is not known"),
        (line("a", tenant="x") + line("a", tenant="y"), "line 2: the hash is that of a line above"),
        ('{"hash": "one", "tenant": "x"}', "line 1: hash has to be sha256: and the 64"),
        ('{"hash": "sha256:abcd", "tenant": "x"}', "line 1: hash has to be sha256: and the 64"),
    ],
)
def test_a_line_that_cannot_be_meant_is_named(text, complaint):
    """Rather than a token with other rights than were meant."""
    with pytest.raises(TokenFileError, match=complaint):
        parse_tokens(text)


@given(
    st.text()
    | st.lists(st.dictionaries(st.sampled_from(["hash", "tenant", "role", "name"]), st.text())).map(
        lambda lines: "\n".join(map(json.dumps, lines))
    )
)
def test_no_text_breaks_the_reader(text):
    with contextlib.suppress(TokenFileError):
        assert all(token.caller.roles for token in parse_tokens(text).tokens)


def test_only_the_secret_itself_is_found(path):
    file = TokenFile(path)
    assert file.find("one").caller.tenant == "blue"
    for other in ("", "on", "one ", "One", hashlib.sha256(b"one").hexdigest(), "\ud800"):
        assert file.find(other) is None


def test_a_file_that_cannot_be_read_ends_the_start(tmp_path):
    with pytest.raises(TokenFileError, match=r"--tokens: cannot read .*nowhere"):
        TokenFile(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(TokenFileError, match=r"--tokens: cannot read .*binary"):
        TokenFile(tmp_path / "binary")


async def test_new_tokens_are_found_and_removed_ones_reported(file, path):
    path.write_text(line("one", tenant="red") + line("two", tenant="blue"))
    await wait_until(lambda: file.removed)
    assert file.removed == [frozenset({hashlib.sha256(b"one").digest()})]
    assert (file.find("one").caller.tenant, file.find("two").caller.tenant) == ("red", "blue")

    path.write_text(line("two", tenant="blue"))
    await wait_until(lambda: len(file.removed) == 2)
    assert file.find("one") is None


@pytest.mark.parametrize("put", [lambda path: path.write_text("nonsense"), os.mkfifo], ids=["nonsense", "a FIFO"])
async def test_a_damaged_file_changes_nothing_and_is_complained_of_once(file, path, put):
    with capture_logs() as events:
        path.unlink()
        put(path)
        await wait_until(lambda: any(str(path) in event["error"] for event in events))
        await asyncio.sleep(0.05)
        assert {event["event"] for event in events} == {"tokens_not_read"}
        assert len({event["error"] for event in events}) == len(events)
        assert file.find("one").caller.tenant == "blue"
        path.unlink()
        path.write_text(line("three", tenant="blue"))
        await wait_until(lambda: file.find("three"))
    assert file.find("one") is None
