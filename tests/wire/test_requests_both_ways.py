"""What the client library sends is what the edge reads, and the other way round; what is unset stays unset. A model's
defaults reach clients through all of it.
"""

from dataclasses import asdict, replace

import pytest

from edge_rig.tokenizers import served_model
from paceline.plan import values
from paceline.plan.durations import read_duration
from paceline.plan.hashes import TOKENIZER_FORM
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.values import FinishReason as CoreFinishReason
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_client import Message, Output, Sampling, Scheduling, Stopping, Timeout, Tool, ToolCall, ToolChoice
from paceline_client.hashing import rolling_hash
from paceline_client.requests import Chat, GenerationRequest, Text
from paceline_client.results import (
    FinishReason,
    ReasoningPart,
    TextPart,
    TokenLogprob,
    TokenLogprobs,
    ToolCallPart,
    Usage,
)
from paceline_client.wire import drain_reason, generate_message, read_deltas, read_failures
from paceline_client.wire_requests import Held
from paceline_executor.link.tokenizer import tokenizer_content
from paceline_executor.weights.tokenizer import SpecialTokens, make_bundle
from paceline_scheduler.api import wire
from paceline_scheduler.api.outbox import FailedRequest, Finish, MessageContent, PendingDelta
from paceline_scheduler.api.resumption import body_of, check_resumption, is_begun, number_of
from paceline_scheduler.api.text.parts.part import Part, PartKind
from paceline_scheduler.errors import SlowConsumerError
from paceline_scheduler.link.wire import decode_tokenizer


def sent(prompt=None, attachment=(), **parts):
    parts = {
        "sampling": Sampling(),
        "stopping": Stopping(),
        "output": Output(),
        "scheduling": Scheduling(),
        "timeout": Timeout(),
    } | parts
    request = GenerationRequest(prompt=prompt or Text("hi"), request_id="r", tenant="t", model="m", **parts)
    return generate_message(request, *attachment, max_bytes=10_000).generate


def test_what_is_unset_arrives_as_unset():
    read = sent()
    assert read == pb.GenerateRequest(
        model="m",
        request_id="r",
        tenant="t",
        text="hi",
        resumable=True,
        attachment=1,
        cache_salt="",
        bypass_prefix_cache=False,
    )
    assert (number_of(read), is_begun(read)) == (1, False)


def test_zeros_arrive_as_zeros():
    read = sent(
        sampling=Sampling(temperature=0.0, presence_penalty=0.0, n=0),
        stopping=Stopping(min_tokens=0, include_stop_str_in_output=False),
        output=Output(logprobs=0, prompt_logprobs=0, skip_special_tokens=False, stream_interval=0),
        scheduling=Scheduling(priority=0),
    )
    assert read.sampling == sampling_pb2.SamplingParams(temperature=0.0, presence_penalty=0.0, n=0)
    assert read.stopping == sampling_pb2.StoppingParams(min_tokens=0, include_stop_str_in_output=False)
    assert read.output == sampling_pb2.OutputOptions(
        logprobs=0, prompt_logprobs=0, skip_special_tokens=False, stream_interval=0
    )
    assert (read.HasField("priority"), read.priority) == (True, 0)


def test_every_value_arrives():
    read = sent(
        Chat((Message("user", "hi"),)),
        sampling=Sampling(
            temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**64 - 1, presence_penalty=1.0,
            frequency_penalty=-1.0, repetition_penalty=1.5, n=16,
        ),
        stopping=Stopping(
            max_tokens=7, min_tokens=2, stop=["a", "b"], stop_token_ids=[9], ignore_eos=True,
            include_stop_str_in_output=True,
        ),
        output=Output(logprobs=3, prompt_logprobs=1, skip_special_tokens=True, stream_interval=2),
        scheduling=Scheduling(priority=-100, cache_salt="s", bypass_prefix_cache=True),
        timeout=Timeout(total_seconds=1.5),
    )  # fmt: skip
    assert read == pb.GenerateRequest(
        model="m",
        request_id="r",
        tenant="t",
        chat={"messages": [{"role": "user", "content": "hi"}]},
        sampling={
            "temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1, "presence_penalty": 1.0,
            "frequency_penalty": -1.0, "repetition_penalty": 1.5, "n": 16,
        },
        stopping={
            "max_tokens": 7, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True,
            "include_stop_str_in_output": True,
        },
        output={"logprobs": 3, "prompt_logprobs": 1, "skip_special_tokens": True, "stream_interval": 2},
        priority=-100,
        cache_salt="s",
        bypass_prefix_cache=True,
        timeout={"seconds": 1, "nanos": 500_000_000},
        resumable=True,
        attachment=1,
    )  # fmt: skip


def test_every_part_of_a_chat_arrives():
    read = sent(
        Chat(
            (
                Message("user", "hi", name="Ann"),
                Message("assistant", reasoning="hm", tool_calls=(ToolCall("1", "f", "{}"),)),
                Message("tool", "21", tool_call_id="1"),
            ),
            (Tool("f", "it does", {"type": "object"}, strict=False), Tool("g")),
            ToolChoice(mode="none", parallel_calls=True),
            {"a": False, "b": 2, "c": 0.5, "d": "x"},
            continue_final_message=False,
        )
    )
    assert read.chat == pb.Chat(
        messages=[
            {"role": "user", "content": "hi", "name": "Ann"},
            {"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
            {"role": "tool", "content": "21", "tool_call_id": "1"},
        ],
        tools=[
            {"name": "f", "description": "it does", "parameters_json_schema": '{"type":"object"}', "strict": False},
            {"name": "g"},
        ],
        tool_choice={"mode": pb.TOOL_CHOICE_MODE_NONE, "parallel_calls": True},
        template_arguments={
            "a": pb.TemplateArgument(flag=False),
            "b": pb.TemplateArgument(integer=2),
            "c": pb.TemplateArgument(number=0.5),
            "d": pb.TemplateArgument(text="x"),
        },
        continue_final_message=False,
    )


def test_a_client_that_comes_back_is_taken_at_its_word():
    held = (Held(0, (5, 6), rolling_hash((5, 6)), 2), Held(2, (7,), rolling_hash((7,)), 1, is_finished=True))
    first = sent(sampling=Sampling(n=3))
    again = sent(attachment=(held, 4, 1.5), sampling=Sampling(n=3))

    assert body_of(again) == body_of(first)
    valid = check_resumption(again, 3, max_model_len=9, vocab_size=8)
    assert (again.resumable, number_of(again), read_duration(again.waited), valid.is_begun) == (True, 4, 1.5, True)
    assert valid.is_finished == (False, False, True)
    assert [(each.resume_from, each.last_attempt) for each in valid.points] == [(2, 2), (0, 0), (1, 1)]
    first_prior, no_prior, last_prior = (each.prior_output_token_ids for each in valid.points)
    assert (first_prior.tolist(), no_prior, last_prior.tolist()) == ([5, 6], None, [7])


def test_output_arrives():
    logprobs = (values.TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.0))),)
    finish = Finish(CoreFinishReason.STOP, "END", None, 3, 2, 4)
    delta = PendingDelta("r", 2, 1, 77, [5, 6], "ab", logprobs, finish, index=3)
    failure = FailedRequest("other", SlowConsumerError("read faster"))

    response = wire.session_response(MessageContent((delta,), (failure,), heartbeat=False, drain=None))

    (item,) = read_deltas(response)
    assert drain_reason(response) is None
    read = item.delta
    assert (item.request_id, item.rolling_hash, read.index, read.offset, read.attempt) == ("r", 77, 3, 2, 1)
    assert (read.text, read.token_ids, read.finish_reason) == ("ab", (5, 6), FinishReason.STOP)
    assert read.logprobs == (TokenLogprobs(5, -0.5, (TokenLogprob(5, -0.5), TokenLogprob(6, -1.0))),)
    assert (item.finish.matched_stop, item.finish.usage) == ("END", Usage(3, 2, 4))
    ((request_id, error),) = read_failures(response)
    assert (request_id, type(error).__name__, str(error)) == ("other", "SlowConsumerError", "read faster")


def test_parts_and_bytes_of_tokens_arrive():
    logprobs = (values.TokenLogprobs(1, -0.5, ((0, -1.0),)),)
    parts = [
        Part(PartKind.REASONING, "Hm."),
        Part(PartKind.TEXT, "Yes."),
        Part(PartKind.CALL, "{", 1, "abc123DEF", "f"),
        Part(PartKind.CALL, "}", 1),
    ]
    finish = Finish(CoreFinishReason.STOP, None, None, 3, 0, 4, num_reasoning_tokens=2)
    delta = PendingDelta("r", 0, 1, 77, [1], "", logprobs, finish, parts=parts, token_bytes=(b"a", b"\xc5"))

    response = wire.session_response(MessageContent((delta,), (), heartbeat=False, drain=None))

    (item,) = read_deltas(response)
    call = ToolCallPart(1, "{", "abc123DEF", "f"), ToolCallPart(1, "}")
    assert item.delta.parts == (ReasoningPart("Hm."), TextPart("Yes."), *call)
    assert item.delta.logprobs == (TokenLogprobs(1, -0.5, (TokenLogprob(0, -1.0, b"a"),), b"\xc5"),)
    assert item.finish.usage.num_reasoning_tokens == 2


def test_how_a_model_marks_its_output_travels_to_the_scheduler():
    bundle = make_bundle(b"{}", None, SpecialTokens(None, None, ()), GenerationDefaults())
    marked = replace(bundle, response_template='{"fields": {}}')
    sources = [decode_tokenizer(tokenizer_content(each), TOKENIZER_FORM) for each in (bundle, marked)]
    assert [source.response_template for source in sources] == [None, '{"fields": {}}']
    assert sources[0].digest != sources[1].digest


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_generation_default_travels_from_the_model_to_the_client(field):
    special = SpecialTokens(None, None, ())
    bundle = make_bundle(b"{}", None, special, GenerationDefaults(**{field: 1}))
    source = decode_tokenizer(tokenizer_content(bundle), TOKENIZER_FORM)
    shown = wire.model(served_model(source)).default_sampling

    assert {name: value for name, value in asdict(source.defaults).items() if value is not None} == {field: 1}
    assert [(named.name, value) for named, value in shown.ListFields()] == [(field, 1)]
