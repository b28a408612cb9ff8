"""The parts of an output as a caller gets them, and on a terminal."""

import pytest
from typer.testing import CliRunner

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_cli.app import app
from paceline_client import (
    AsyncClient,
    Client,
    Output,
    ReasoningPart,
    TextPart,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    ToolCallPart,
    wire,
)
from paceline_client.testing import Break, End, FakeServer, Tokens

SCRIPT = [
    Tokens((1,), "<think>Hm", parts=(ReasoningPart("Hm"),)),
    Tokens((2,), ".</think>Wait.", parts=(ReasoningPart("."), TextPart("Wait."))),
    Tokens((3,), "<call>f{", parts=(ToolCallPart(0, "{", "abc123DEF", "f"),)),
    Break(),
    Tokens((4,), "}g{}", parts=(ToolCallPart(0, '"a": 1}'), ToolCallPart(1, "{}", "abc123DEG", "g"))),
    End(),
]
CALLS = (ToolCall("abc123DEF", "f", '{"a": 1}'), ToolCall("abc123DEG", "g", "{}"))


async def test_deltas_have_their_parts_and_the_result_has_them_whole():
    async with FakeServer(SCRIPT) as server, AsyncClient(server.target) as client:
        async with client.stream("?", output=Output(parts=True)) as stream:
            parts = [part async for delta in stream for part in delta.parts]
        completion = stream.result.completions[0]
    assert parts == [part for step in SCRIPT if isinstance(step, Tokens) for part in step.parts]
    assert (completion.content, completion.reasoning, completion.tool_calls) == ("Wait.", "Hm.", CALLS)
    assert completion.text == "<think>Hm.</think>Wait.<call>f{}g{}"


def test_the_threaded_client_has_them_too():
    with FakeServer(SCRIPT) as server, Client(server.target) as client:
        result = client.generate("?", output={"parts": True})
    assert (result.content, result.reasoning, result.tool_calls) == ("Wait.", "Hm.", CALLS)


def test_who_does_not_ask_gets_none():
    with FakeServer(SCRIPT) as server, Client(server.target) as client:
        result = client.generate("?")
    assert (result.content, result.reasoning, result.tool_calls) == ("", "", ())


def test_bytes_of_tokens_and_counts_of_reasoning_are_read():
    logprobs = sampling_pb2.TokenLogprobs(token_id=1, logprob=-0.5, token_bytes=b"\xe2\x98")
    logprobs.top.add(token_id=2, logprob=-0.25, token_bytes=b"")
    delta = pb.Delta(logprobs=[logprobs], finish={"reason": 1, "usage": {"num_reasoning_tokens": 7}})
    (received,) = wire.read_deltas(pb.SessionResponse(deltas=[{"request_id": "r1", "delta": delta}]))
    assert received.delta.logprobs == (TokenLogprobs(1, -0.5, (TokenLogprob(2, -0.25, b""),), b"\xe2\x98"),)
    assert received.finish.usage.num_reasoning_tokens == 7


@pytest.mark.parametrize("command", [["generate", "?"], ["chat"]])
def test_a_command_shows_text_and_calls_without_their_marks(command):
    with FakeServer(SCRIPT) as server:
        result = CliRunner().invoke(app, [*command, "--target", server.target], input="?\n")
    assert result.stdout == 'Wait.\nf {"a": 1}\ng {}\n'
    assert all(request.output.parts for request in server.seen.requests)
