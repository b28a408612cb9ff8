"""Parts of outputs at the edge: when they are told, to clients that come back too, and what goes with them."""

import dataclasses
import json

import pytest
import structlog
from tokenizers import AddedToken

from edge_rig.edge_client import EdgeClient
from edge_rig.returning_client import ReturningClient
from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api import wire
from paceline_scheduler.api.text.parts import table
from paceline_scheduler.api.text.parts.part import call_id
from paceline_scheduler.core.executors import NO_HISTORY
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError
from paceline_scheduler.link.wire_contexts import read_context, write_context
from part_rig import CHAT_TEMPLATES, gathered

TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_tokens([AddedToken(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
SOURCE = tokenizer_source(TOKENIZER, chat_template=CHAT_TEMPLATES["Qwen-Qwen3-0.6B"], eos_token="<|im_end|>")
MODEL = served_model(SOURCE, max_model_len=4096, vocab_size=410)
END = TOKENIZER.token_to_id("<|im_end|>")
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é ☃"}}\n</tool_call>'
OUTPUT = f"<think>\nHm…\n</think>\n\nWait. {CALL}\n{CALL.replace('f', 'g')}"
CALLS = (("f", '{"a": "é ☃"}'), ("g", '{"a": "é ☃"}'))


def encode(text):
    return TOKENIZER.encode(text).ids


def asking(**fields):
    return GenerateRequest(**{"request_id": "r1", "text": PROMPT, "output": {"parts": True}, **fields})


def told(deltas):
    return gathered([delta.parts or () for delta in deltas])


async def output_of(edge, backend, request, *steps, reason=FinishReason.STOP):
    """The deltas of one completion; the last step ends it."""
    call = EdgeClient(edge)
    (handle,) = await call.send(request)
    deltas = []
    for number, token_ids in enumerate(steps, 1):
        backend.step({handle: token_ids}, {handle: reason} if number == len(steps) else None)
        deltas += call.collect().deltas
    return deltas


async def test_each_delta_has_the_parts_of_its_tokens(edge, backend):
    tokens = [*encode(OUTPUT), END]
    deltas = await output_of(edge, backend, asking(), *([token] for token in tokens))
    found = told(deltas)
    assert (found.reasoning, found.text, found.calls) == ("Hm…", "Wait.", CALLS)
    assert found.ids == (call_id("r1", 0, 0), call_id("r1", 0, 1))
    assert deltas[-1].finish.num_reasoning_tokens == len(encode("<think>\nHm…\n</think>"))
    assert "".join(delta.text for delta in deltas) == OUTPUT


async def test_tokens_that_come_together_tell_the_same(edge, backend):
    tokens = [*encode(OUTPUT), END]
    together = await output_of(
        edge, backend, asking(output={"parts": True, "stream_interval": 7}), tokens[:3], tokens[3:]
    )
    one_by_one = await output_of(edge, backend, asking(request_id="r1"), *([token] for token in tokens))
    both = told(together), told(one_by_one)
    assert both[0].calls == both[1].calls == CALLS
    assert [each.reasoning + each.text for each in both] == ["Hm…Wait."] * 2


async def test_a_message_says_each_part_by_its_kind(edge, backend):
    (delta,) = await output_of(edge, backend, asking(), [*encode(OUTPUT), END])
    said = wire.generate_response(delta).delta.parts
    assert [part.WhichOneof("part") for part in said] == ["reasoning", "text", "tool_call", "tool_call"]
    assert (said[2].tool_call.index, said[2].tool_call.id, said[2].tool_call.name) == (0, call_id("r1", 0, 0), "f")
    assert wire.generate_response(delta).delta.finish.usage.num_reasoning_tokens > 0


async def test_parts_are_told_to_who_asks(edge, backend):
    (delta,) = await output_of(edge, backend, asking(output={}), [*encode(OUTPUT), END])
    assert delta.parts is None
    assert not wire.generate_response(delta).delta.parts


@pytest.mark.parametrize("knows_it", [True, False], ids=["by the same scheduler", "by another"])
async def test_a_client_that_comes_back_gets_the_rest_of_the_parts_from_any_token(edge, backend, knows_it):
    tokens = [*encode(OUTPUT), END]
    whole = told(await output_of(edge, backend, asking(request_id="whole"), *([token] for token in tokens)))
    for offset in range(len(tokens)):
        client = ReturningClient(edge, asking(request_id=f"r{offset}"))
        await client.come()
        backend.step({client.handle: tokens[:offset]})
        deltas = list(client.call.collect().deltas)
        for delta in deltas:
            client.copy.take(delta)
        if not knows_it:
            backend.forget_everything()
        await client.come()
        backend.step({client.handle: tokens[offset:]}, {client.handle: FinishReason.STOP})
        found = told([*deltas, *client.call.collect().deltas])
        assert (found.reasoning, found.text, found.calls) == (whole.reasoning, whole.text, whole.calls)
        assert found.ids == (call_id(f"r{offset}", 0, 0), call_id(f"r{offset}", 0, 1))


async def test_each_completion_has_calls_of_its_own(edge, backend):
    call = EdgeClient(edge)
    handles = await call.send(asking(sampling={"n": 2}))
    for handle in handles:
        backend.step({handle: [*encode(CALL), END]}, {handle: FinishReason.STOP})
    first, second = (told([delta]) for delta in call.collect().deltas)
    assert first.calls == second.calls == CALLS[:1]
    assert first.ids != second.ids


async def test_the_end_of_the_tokens_inside_a_call_keeps_what_there_is(edge, backend):
    half = encode(CALL)[:-6]
    deltas = await output_of(edge, backend, asking(), half, reason=FinishReason.LENGTH)
    (call,) = told(deltas).calls
    assert call[1]
    assert CALLS[0][1].startswith(call[1])
    assert deltas[-1].finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_special_shown", [False, True])
@pytest.mark.parametrize("stop", ["STOP", "p.</th", "name", '"g"'])
async def test_what_stands_behind_a_stop_text_is_no_part(edge, backend, stop, is_special_shown):
    output = f"<think>Stop.</think>So STOP {CALL} {CALL.replace('f', 'g')}"
    options = {"parts": True, "skip_special_tokens": not is_special_shown}
    request = asking(output=options, stopping={"stop": [stop]})
    call = EdgeClient(edge)
    (handle,) = await call.send(request)
    for token in encode(output):
        if not backend.outputs.by_handle[handle].notice:
            backend.step({handle: [token]})
    found, before = told(call.collect().deltas), output.partition(stop)[0]
    expected = {
        "STOP": ("Stop.", "So", ()),
        "p.</th": ("Sto", "", ()),
        "name": ("Stop.", 'So STOP <tool_call>\n{"', ()),
        '"g"': ("Stop.", 'So STOP  <tool_call>\n{"name":', CALLS[:1]),
    }
    assert stop not in before
    assert (found.reasoning, found.text, found.calls) == expected[stop]


async def test_the_format_goes_with_the_request_to_a_successor(edge, backend):
    call = EdgeClient(edge)
    (handle,) = await call.send(asking(resumable=True))
    request = backend.asked.requests[handle]
    assert request.output_format == "hermes-think@1"
    read, _ = read_context(RecordId("", "r1"), write_context(request, NO_HISTORY))
    assert read.output_format == "hermes-think@1"


async def test_a_request_begun_with_the_format_of_another_release_is_refused(edge, backend):
    client = ReturningClient(edge, asking())
    await client.come()
    output = backend.outputs.by_handle[client.handle]
    output.request = dataclasses.replace(output.request, output_format="hermes-think@77")
    with pytest.raises(UnsupportedError, match="'hermes-think@77', which this release does not have"):
        await client.come()
    output.request = dataclasses.replace(output.request, output_format="hermes@1")
    await client.come()
    backend.step({client.handle: [*encode("<think>Hm."), END]}, {client.handle: FinishReason.STOP})
    assert told(client.call.collect().deltas).text == "<think>Hm."


async def test_the_bytes_of_tokens_stand_beside_their_log_probabilities(edge, backend):
    half, think = encode("ż")[0], encode("<think>")[0]
    call = EdgeClient(edge)
    (handle,) = await call.send(asking(output={"logprobs": 1, "token_bytes": True}))
    logprobs = (TokenLogprobs(half, -0.5, ((think, -0.25),)), TokenLogprobs(END, -1.0, ()))
    backend.step({handle: [half, END]}, {handle: FinishReason.STOP}, logprobs={handle: logprobs})
    message = wire.generate_response(call.delta()).delta
    assert [each.token_bytes for each in message.logprobs] == [b"\xc5", b"<|im_end|>"]
    assert message.logprobs[0].top[0].token_bytes == b"<think>"


async def support(edge, **fields):
    model = served_model(dataclasses.replace(SOURCE, digest=json.dumps(sorted(fields)), **fields), vocab_size=410)
    return wire.model(model, await edge.texts.parts_support(model)), model


async def test_a_model_whose_chat_template_writes_calls_that_are_read_takes_tools(edge):
    shown, model = await support(edge)
    assert (shown.supports_tools, shown.supports_reasoning) == (True, True)
    await edge.texts.require_tools([], model)


@pytest.mark.parametrize(
    ("chat_template", "why"),
    [
        pytest.param("{{ messages }}", "no marks of calls are known", id="no marks"),
        pytest.param(
            "{{ tools and '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "<tool_call>{'name': '{{ m.tool_calls }}'}</tool_call>{% endfor %}{# \"name\": \" #}",
            "which is not read as one",
            id="another way to write calls",
        ),
        pytest.param(
            '{{ tools }}<tool_call> "name": " {{ messages.tool_calls }}{{ raise_exception(\'No tools!\') }}',
            "No tools!",
            id="refused",
        ),
        pytest.param('{{ tools }}<tool_call> "name": " {{ messages.tool_calls() }}', "fails", id="failing"),
        pytest.param('<tool_call> "name": " {{ messages }}', "does not show tools", id="no tools"),
    ],
)
async def test_a_model_that_cannot_be_shown_to_write_calls_takes_no_tools(edge, chat_template, why):
    with structlog.testing.capture_logs() as lines:
        shown, model = await support(edge, chat_template=chat_template)
        with pytest.raises(UnsupportedError, match=why) as caught:
            await edge.texts.require_tools([], model)
    assert not shown.supports_tools
    assert caught.value.feature == "chat.tools"
    is_known = table.chosen(chat_template) is not table.NO_ENTRY
    assert [line["event"] for line in lines] == ["tools_unavailable"] * is_known


async def test_a_template_that_was_not_rendered_in_time_is_tried_again(edge, monkeypatch):
    chats = edge.texts._chats
    render = chats.render

    async def late(*arguments):
        raise InvalidRequestError("chat", "the model's chat template fails: it takes too long")

    monkeypatch.setattr(chats, "render", late)
    shown, _ = await support(edge)
    monkeypatch.setattr(chats, "render", render)
    again, _ = await support(edge)
    assert (shown.supports_tools, again.supports_tools) == (False, True)


async def test_the_checkpoints_own_response_template_comes_first(edge, backend):
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {}, "thinking": {"open": "{", "close": "}"}},
    }
    shown, model = await support(edge, response_template=json.dumps(own))
    assert (shown.supports_tools, shown.supports_reasoning) == (False, True)
    backend.come(model)
    (delta,) = await output_of(edge, backend, asking(), [*encode("{Hm.}<think>"), END])
    assert (told([delta]).reasoning, told([delta]).text) == ("Hm.", "<think>")
    assert edge.texts.format_name(model.tokenizer).startswith("checkpoint:")


async def test_one_that_cannot_be_read_is_named_in_the_log_and_the_table_counts(edge):
    with structlog.testing.capture_logs() as lines:
        shown, _ = await support(edge, response_template='{"fields": {"images": {}}}')
    assert shown.supports_tools
    assert [(line["event"], line["used"]) for line in lines] == [("response_template_refused", "hermes-think@1")]
