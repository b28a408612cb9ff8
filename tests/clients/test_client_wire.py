"""A request as a message: unset is not zero, and what does not fit is refused by the name of its field."""

import math

import numpy as np
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline_client import Output, Sampling, Scheduling, Stopping, Timeout, Tool, ToolCall, ToolChoice
from paceline_client.errors import InvalidRequestError
from paceline_client.requests import Chat, GenerationRequest, Message, Text, TokenIds, make_prompt
from paceline_client.wire import generate_message

REFUSED_BY_SERVERS = ("parts",)  # of this release; what they would do is told in protos/README.md


def encode(prompt=None, *, max_bytes=10_000, tenant="", **parts):
    """The message of a request with these parts and defaults for the rest."""
    request = GenerationRequest(
        prompt=prompt or Text("hi"),
        request_id="r",
        tenant=tenant,
        model="",
        sampling=parts.get("sampling", Sampling()),
        stopping=parts.get("stopping", Stopping()),
        output=parts.get("output", Output()),
        scheduling=parts.get("scheduling", Scheduling()),
        timeout=parts.get("timeout", Timeout()),
    )
    return generate_message(request, max_bytes=max_bytes).generate


def test_what_is_unset_is_not_sent():
    assert encode() == pb.GenerateRequest(request_id="r", text="hi", resumable=True, attachment=1)


def test_zero_is_sent():
    message = encode(sampling=Sampling(temperature=0.0, seed=0), output=Output(logprobs=0))
    assert message.sampling.HasField("temperature")
    assert message.sampling.HasField("seed")
    assert message.output.HasField("logprobs")


def test_every_option_arrives():
    message = encode(
        sampling=Sampling(
            temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**64 - 1, presence_penalty=1.0,
            frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias={3: -2.0}, allowed_token_ids=[5],
            bad_words=["no"], n=3,
        ),
        stopping=Stopping(
            max_tokens=7, min_tokens=2, stop=["a", "b"], stop_token_ids=[9], ignore_eos=True,
            include_stop_str_in_output=True,
        ),
        output=Output(logprobs=3, prompt_logprobs=1, token_bytes=True, skip_special_tokens=False, stream_interval=2),
        scheduling=Scheduling(priority=-1, cache_salt="s", bypass_prefix_cache=True, max_num_draft_tokens=0),
        timeout=Timeout(total_seconds=1.5),
        tenant="t",
    )  # fmt: skip
    assert (message.sampling.seed, dict(message.sampling.logit_bias)) == (2**64 - 1, {3: -2.0})
    assert (list(message.stopping.stop), message.stopping.ignore_eos) == (["a", "b"], True)
    assert (message.output.skip_special_tokens, message.output.stream_interval) == (False, 2)
    assert (message.priority, message.cache_salt, message.bypass_prefix_cache) == (-1, "s", True)
    assert message.speculation.HasField("max_num_draft_tokens")
    assert message.speculation.max_num_draft_tokens == 0
    assert (message.timeout.ToMilliseconds(), message.tenant) == (1500, "t")
    for part in (message.sampling, message.stopping, message.output):
        supported = [field.name for field in part.DESCRIPTOR.fields if field.name not in REFUSED_BY_SERVERS]
        assert supported == [field.name for field, _ in part.ListFields()]


def test_one_stop_text_may_stand_alone():
    assert list(encode(stopping=Stopping(stop="END")).stopping.stop) == ["END"]
    assert encode(stopping=Stopping(stop=None)) == encode()


def test_one_bad_word_may_stand_alone():
    assert list(encode(sampling=Sampling(bad_words="word")).sampling.bad_words) == ["word"]


def test_lists_of_ids_may_be_arrays():
    sent = encode(
        make_prompt(None, None, np.array([1, 2])),
        sampling=Sampling(allowed_token_ids=np.array([3, 4])),
        stopping=Stopping(stop_token_ids=np.array([], dtype=np.int32)),
    )
    assert (list(sent.token_ids.ids), list(sent.sampling.allowed_token_ids)) == ([1, 2], [3, 4])
    assert not sent.stopping.stop_token_ids
    with pytest.raises(InvalidRequestError, match="token_ids"):
        make_prompt(None, None, 5)


@pytest.mark.parametrize("seconds", [math.inf, 1e300, 1e12])
def test_a_limit_beyond_all_clocks_is_a_year(seconds):
    """Infinity is how some say that there is none; messages cannot hold it."""
    assert encode(timeout=Timeout(total_seconds=seconds)).timeout.seconds == 365 * 86400


def test_prompts_of_each_kind():
    assert encode(Text("")).WhichOneof("prompt") == "text"
    chat = encode(Chat((Message("user", "hi"),))).chat
    assert (chat.messages[0].role, chat.messages[0].content) == ("user", "hi")
    assert list(encode(TokenIds((1, 2))).token_ids.ids) == [1, 2]
    assert encode(TokenIds(())).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"sampling": Sampling(seed=2**64)}, "sampling.seed"),
        ({"sampling": Sampling(seed=-1)}, "sampling.seed"),
        ({"sampling": Sampling(top_k=2**31)}, "sampling.top_k"),
        ({"sampling": Sampling(logit_bias={2**40: 1.0})}, "sampling.logit_bias"),
        ({"sampling": Sampling(allowed_token_ids=[2**31])}, "sampling.allowed_token_ids"),
        ({"sampling": Sampling(allowed_token_ids=5)}, "sampling.allowed_token_ids"),
        ({"stopping": Stopping(stop_token_ids=np.ones((2, 2)))}, "stopping.stop_token_ids"),
        ({"stopping": Stopping(max_tokens="five")}, "stopping.max_tokens"),
        ({"stopping": Stopping(stop=["\ud800"])}, "stopping.stop"),
        ({"stopping": Stopping(stop=5)}, "stopping.stop"),
        ({"sampling": Sampling(logit_bias=[(1, 2.0)])}, "sampling.logit_bias"),
        ({"prompt": Text("\udfff")}, "text"),
        ({"prompt": Chat((Message("user", "a"), Message("user", "\ud800")))}, "chat.messages[1].content"),
        ({"prompt": TokenIds((-(2**40),))}, "token_ids.ids"),
        ({"prompt": Chat((Message("tool", tool_call_id=5),))}, "chat.messages[0].tool_call_id"),
        ({"prompt": Chat((), (Tool("f", strict="x"),))}, "chat.tools[0].strict"),
        ({"prompt": Chat((), (Tool("f", parameters={"a": {1}}),))}, "tools.parameters"),
        ({"prompt": Chat((), (), ToolChoice(mode="maybe"))}, "chat.tool_choice.mode"),
        ({"prompt": Chat((), template_arguments={"x": None})}, "chat.template_arguments[x]"),
        ({"prompt": Chat((), template_arguments={5: True})}, "chat.template_arguments[5]"),
        ({"prompt": Chat((), template_arguments={"x": 2**63})}, "chat.template_arguments[x].integer"),
        ({"prompt": Text("x" * 20_000)}, "prompt"),
        ({"tenant": b"\xff"}, "tenant"),
    ],
)
def test_what_has_no_place_in_a_message_is_refused_by_name(parts, field):
    """Numbers beyond the type, lone surrogates, a request larger than servers take: never a protobuf error."""
    with pytest.raises(InvalidRequestError) as caught:
        encode(**parts)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize("given", [(None, None, None), ("a", [Message("user", "b")], None), ("a", None, [1])])
def test_exactly_one_prompt(given):
    with pytest.raises(InvalidRequestError, match="exactly one"):
        make_prompt(*given)


def test_messages_may_be_mappings():
    assert make_prompt(None, [{"role": "user", "content": "hi"}]) == Chat((Message("user", "hi"),))
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]: has no 'speaker'; there is role, content"):
        make_prompt(None, [{"role": "user", "content": "hi", "speaker": "x"}])


CALL = ToolCall("a1B2c3D4e", "weather", '{"in": "Zürich"}')
SCHEMA = {"type": "object", "properties": {"in": {"type": "string"}}}


def test_chats_with_tools_may_be_mappings_as_others_write_them():
    function = {"name": "weather", "arguments": '{"in": "Zürich"}'}
    described = {"name": "weather", "parameters": SCHEMA}
    made = make_prompt(
        None,
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": CALL.id, "type": "function", "function": function}],
            },
            {"role": "assistant", "tool_calls": [{"id": CALL.id, **function}], "reasoning": "hm"},
            Message("tool", "21", tool_call_id=CALL.id),
        ],
        tools=[described, {"type": "function", "function": described}, Tool("weather", parameters=SCHEMA)],
        tool_choice="auto",
    )
    assert made == Chat(
        (
            Message("assistant", tool_calls=(CALL,)),
            Message("assistant", tool_calls=(CALL,), reasoning="hm"),
            Message("tool", "21", tool_call_id=CALL.id),
        ),
        (Tool("weather", parameters=SCHEMA),) * 3,
        ToolChoice(mode="auto"),
    )


def test_a_text_chooses_a_tool_unless_it_is_a_mode():
    chosen = [make_prompt(None, [], tool_choice=choice).tool_choice for choice in ("required", "weather")]
    assert chosen == [ToolChoice(mode="required"), ToolChoice(name="weather")]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": {"name": "f"}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [Tool("f"), {"description": "it has no name"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"nome": "f"}}]}, "tools[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"template_arguments": [1]}, "template_arguments"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        *[
            ({"messages": None, "text": "a", **more}, "messages")
            for more in ({"tools": [Tool("f")]}, {"continue_final_message": True})
        ],
    ],
)
def test_what_is_no_chat_is_refused_by_name(given, field):
    with pytest.raises(InvalidRequestError) as caught:
        make_prompt(**({"text": None, "messages": [Message("user", "hi")]} | given))
    assert caught.value.violations[0].field == field
