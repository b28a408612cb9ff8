"""What the scheduler's core decides is what the executor's rows get, and a model's defaults reach its clients.

The protocol's codec has tests of its own in tests/protos; here its two users meet.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.codec import decode_request, encode_request
from paceline.plan.values import FinishReason, GenerationDefaults, RecordId, RowFinish, SamplingParams
from paceline.v1 import plan_pb2, sampling_pb2
from paceline_executor.link.servicer_views import tokenizer_parts
from paceline_executor.weights.tokenizer import SpecialTokens, make_bundle
from paceline_scheduler.api import wire as api_wire
from paceline_scheduler.link.wire import decode_tokenizer_part
from paceline_scheduler.link.wire_contexts import with_contexts
from paceline_scheduler.testing.requests import make_placement, make_request
from paceline_scheduler.testing.tokenizers import served_model


def to_executor(*placements):
    """What the executor reads of a plan with these placements."""
    harness = CoreHarness(make_executor())
    harness.submit(make_request())
    (plan,) = decode_request(encode_request(with_contexts(replace(harness.plan(), new_requests=placements))))
    return plan.new_requests


def test_a_placement_arrives():
    request = make_request([1, 2, 3], request_id="r", tenant="t", seed=2**64 - 1, end_token_ids=(2,), num_logprobs=0)
    placement = make_placement(4, request, 2, [9], max_tokens=16, num_cached_tokens=2, num_preemptions=1, waited_s=0.25)

    (arrived,) = to_executor(placement)

    assert (arrived.row, arrived.attempt, arrived.max_tokens, arrived.num_cached_tokens) == (4, 2, 16, 2)
    assert arrived.record_id == RecordId("t", "r")
    assert (arrived.prompt_token_ids.tolist(), arrived.output_token_ids.tolist()) == ([1, 2, 3], [9])
    assert arrived.sampling == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**64 - 1)
    assert (arrived.end_token_ids, arrived.num_logprobs, arrived.unsupported_fields) == ((2,), 0, ())
    context = plan_pb2.RequestContext.FromString(arrived.context)
    assert (context.num_preemptions, context.waited.ToMilliseconds()) == (1, 250)


def test_everything_that_shapes_the_choice_of_a_token_arrives():
    request = make_request([1, 2], min_tokens=3, num_prompt_logprobs=0)
    sampling = replace(
        request.sampling,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias=((3, -2.0), (7, 100.0)),
        allowed_token_ids=(9, 4),
    )
    (arrived,) = to_executor(
        make_placement(
            0,
            replace(
                request, sampling=sampling, bad_words=((5,), (6, 7)), ignored_end_token_ids=(8,), end_token_ids=(2,)
            ),
        )
    )
    assert arrived.sampling.presence_penalty == -0.5
    assert arrived.sampling.frequency_penalty == 0.25
    assert arrived.sampling.repetition_penalty == 1.5
    assert arrived.sampling.logit_bias == ((3, -2.0), (7, 100.0))
    assert arrived.sampling.allowed_token_ids == (9, 4)
    assert (arrived.min_tokens, arrived.end_token_ids, arrived.ignored_end_token_ids) == (3, (2,), (8,))
    assert arrived.bad_word_token_ids == ((5,), (6, 7))
    assert (arrived.num_prompt_logprobs, arrived.unsupported_fields) == (0, ())


def test_what_shapes_nothing_does_not_travel():
    (arrived,) = to_executor(make_placement(0, make_request([1, 2])))
    sampling = arrived.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.logit_bias, sampling.allowed_token_ids, arrived.bad_word_token_ids) == ((), (), ())
    assert (arrived.min_tokens, arrived.num_prompt_logprobs) == (0, None)
    (again,) = to_executor(make_placement(0, make_request([1, 2], num_prompt_logprobs=2), output=[5]))
    assert again.num_prompt_logprobs is None


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_generation_default_travels_from_the_model_to_the_client(field):
    special = SpecialTokens(None, None, None, (), add_bos=False)
    bundle = make_bundle(b"{}", None, special, GenerationDefaults(**{field: 1}))
    (part,) = tokenizer_parts(SimpleNamespace(tokenizer=bundle))

    source, is_last = decode_tokenizer_part(part.SerializeToString())
    shown = api_wire.model(served_model(source)).default_sampling

    assert is_last
    assert {name: value for name, value in asdict(source.defaults).items() if value is not None} == {field: 1}
    assert [(named.name, value) for named, value in shown.ListFields()] == [(field, 1)]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(RowFinish, plan_pb2.RowFinish), (FinishReason, sampling_pb2.FinishReason)]
)
def test_enums_have_the_protocols_numbers(ours, theirs):
    names = {value: name for name, value in theirs.items()}
    assert [value.value for value in ours] == sorted(names)
    for value in ours:
        assert value.value == 0 or names[value.value].endswith(value.name)
