"""What of a request reaches the scheduler, and what is refused, by which name. Behind the gateway is a real edge."""

import contextlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL
from gateway_rig import ASKING, CHAT, serve_gateway
from paceline_client.testing import FakeServer, say
from paceline_gateway.bodies import ChatBody, CompletionBody, read_body
from paceline_gateway.errors import ApiError

COMPLETIONS = "/v1/completions"


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


SENT = [
    ({"max_completion_tokens": 3}, "stopping.max_tokens", 3),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "stopping.max_tokens", 3),
    ({"temperature": 0}, "sampling.temperature", 0),
    ({"top_p": 0}, "sampling.top_p", f32(1e-6)),
    ({"top_k": -1}, "sampling.top_k", None),
    ({"top_k": 5}, "sampling.top_k", 5),
    ({"seed": -1}, "sampling.seed", 2**64 - 1),
    ({"stop": "x"}, "stopping.stop", ["x"]),
    ({"stop": None}, "stopping.stop", []),
    ({"logit_bias": {"7": -2}}, "sampling.logit_bias", {7: -2.0}),
    ({"logprobs": True}, "output.logprobs", 0),
    ({"logprobs": True, "top_logprobs": 2}, "output.logprobs", 2),
    ({"logprobs": None}, "output.logprobs", None),
    ({"service_tier": "flex"}, "priority", 50),
    ({"service_tier": "flex", "priority": 3}, "priority", 3),
    ({"response_format": {"type": "text"}}, "structured.json_object", None),
    ({"response_format": {"type": "json_object"}}, "structured.json_object", True),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}}}},
        "structured.json_schema",
        '{"b":1,"a":2}',
    ),
    ({"structured_outputs": {"regex": "a+"}}, "structured.regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "structured.choice.options", ["a", "b"]),
    ({"tools": [], "tool_choice": "none", "store": False, "user": "u", "metadata": {}}, "sampling.n", None),
    ({"repetition_penalty": 1.0, "ignore_eos": True}, "stopping.ignore_eos", True),
]
TEXTS = [
    ({"role": "developer", "content": "x"}, ("system", "x")),
    ({"role": "user", "content": None}, ("user", "")),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}, ("user", "x\ny")),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ("assistant", "no")),
]


def value_at(message, path):
    """None where it is unset."""
    *parts, name = path.split(".")
    for part in parts:
        message = getattr(message, part)
    value = getattr(message, name)
    if not message.DESCRIPTOR.fields_by_name[name].is_repeated:
        return value if message.HasField(name) else None
    return dict(value) if hasattr(value, "items") else list(value)


async def test_every_parameter_goes_where_it_belongs():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        for more, path, expected in SENT:
            response = await gateway.post(CHAT, ASKING | more)
            assert response.status_code == 200, (more, response.text)
            assert value_at(server.seen.requests[-1], path) == expected, more
        for turn, expected in TEXTS:
            await gateway.post(CHAT, {"messages": [turn]})
            (said,) = server.seen.requests[-1].chat.messages
            assert (said.role, said.content) == expected


REFUSED = [
    # As the gateway finds it.
    (CHAT, {"messages": []}, 400, "messages", None),
    (CHAT, {"messages": "hi"}, 400, "messages", None),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0]", None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type",
     "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, 400, "messages[0].function_call",
     "unsupported_parameter"),
    (CHAT, ASKING | {"functions": [{"name": "f"}]}, 400, "functions", "unsupported_parameter"),
    (CHAT, ASKING | {"store": True}, 400, "store", "unsupported_parameter"),
    (CHAT, ASKING | {"modalities": ["text", "audio"]}, 400, "modalities", "unsupported_parameter"),
    (CHAT, ASKING | {"temperature": "hot"}, 400, "temperature", None),
    (CHAT, ASKING | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", None),
    (CHAT, ASKING | {"top_logprobs": 2}, 400, "top_logprobs", None),
    (CHAT, ASKING | {"seed": 2**64}, 400, "seed", None),
    (CHAT, ASKING | {"logit_bias": {"a": 1}}, 400, "logit_bias", None),
    (CHAT, ASKING | {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    (CHAT, ASKING | {"guided_regex": "a", "response_format": {"type": "json_object"}}, 400, "response_format", None),
    (CHAT, ASKING | {"response_format": {"type": "xml"}}, 400, "response_format.type", None),
    (CHAT, ASKING | {"add_generation_prompt": False}, 400, "add_generation_prompt", None),
    (COMPLETIONS, {}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": ["a", [1]], "suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": ["a"] * 129}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of", "unsupported_parameter"),
    # As the scheduler finds it.
    (CHAT, ASKING | {"temperature": 101}, 400, "temperature", None),
    (CHAT, ASKING | {"n": 17}, 400, "n", None),
    (CHAT, ASKING | {"stop": ""}, 400, "stop[0]", None),
    (CHAT, ASKING | {"max_tokens": 0}, 400, "max_tokens", None),
    (CHAT, ASKING | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    (CHAT, ASKING | {"model": "gpt-4o"}, 404, "model", "model_not_found"),
    (CHAT, {"messages": [{"role": "", "content": ""}]}, 400, "messages[0].role", None),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 9999}]}, 400, "messages", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": [1] * 999}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs", None),
]  # fmt: skip


async def test_what_is_wrong_is_refused_by_its_name_in_openais_api():
    async with serve_edge(ScriptedBackend(MODEL)) as edge, serve_gateway(edge.address) as gateway:
        for path, body, status, param, code in REFUSED:
            response = await gateway.post(path, body)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (status, param, code), (body, error)
            assert error["type"] == "invalid_request_error"
            # LangChain looks for the one, LiteLLM for the other.
            words = (code or "", "this model's maximum context length is")
            assert (code == "context_length_exceeded") == all(word in error["message"] for word in words)
        for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
            response = await gateway.http.post(CHAT, content=content)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await gateway.http.get(CHAT)).status_code == 405
        for headers, status in (({"authorization": "Basic x"}, 401), ({"idempotency-key": "a b"}, 400)):
            assert (await gateway.post(CHAT, ASKING, headers)).status_code == status


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@settings(max_examples=settings.default.max_examples)
@given(st.data())
def test_no_body_breaks_the_reader(kind, data):
    names = st.sampled_from(kind.__struct_fields__) | st.text(max_size=5)
    body = data.draw(st.dictionaries(names, JSON, max_size=6))
    with contextlib.suppress(ApiError):
        read, ignored = read_body(kind, json.dumps(body).encode())
        assert isinstance(read, kind)
        assert set(ignored) == body.keys() - {*kind.__struct_fields__, *kind.not_done}
