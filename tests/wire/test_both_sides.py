"""What the scheduler writes the executor reads, and the other way round, field by field.

Each side has a wire module of its own and knows nothing of the other's; here the two meet.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.v1 import plan_pb2, sampling_pb2
from paceline_executor.errors import NumericError
from paceline_executor.link import messages as executor_messages
from paceline_executor.link.fence import Approach, Claim
from paceline_executor.link.servicer_views import tokenizer_parts
from paceline_executor.link.wire import ResponseEncoder, decode_request
from paceline_executor.rows import plan as rows
from paceline_executor.rows.logprobs import OutputLogprobs
from paceline_executor.rows.snapshot import SnapshotPart
from paceline_executor.runner.interface import PromptLogprobs, TokenLogprobs
from paceline_executor.weights.tokenizer import GenerationDefaults, SpecialTokens, make_bundle
from paceline_scheduler.api import wire as api_wire
from paceline_scheduler.core import plan as core
from paceline_scheduler.core.request import FinishReason, RecordId
from paceline_scheduler.holder import Holder
from paceline_scheduler.link import messages as scheduler_messages
from paceline_scheduler.link.wire import decode_messages, decode_tokenizer_part, encode_message
from paceline_scheduler.testing.requests import column, make_request
from paceline_scheduler.testing.tokenizers import served_model

PROMPT_LOGPROBS = PromptLogprobs(
    logprobs=np.array([-0.5, -1.5], dtype=np.float32),
    top_token_ids=np.array([[1, 2], [3, 4]], dtype=np.int32),
    top_logprobs=np.array([[-0.25, -2.0], [-0.75, -4.0]], dtype=np.float32),
)


def to_executor(message):
    """A message of the scheduler as the executor reads it."""
    (arrived,) = all_to_executor(message)
    return arrived


def all_to_executor(*messages):
    """What the executor reads of messages that travel as one."""
    return decode_request(plan_pb2.AttachRequest.FromString(encode_message(*messages)))


def to_scheduler(message):
    """A message of the executor as the scheduler reads it."""
    (arrived,) = all_to_scheduler(message)
    return arrived


def all_to_scheduler(message):
    """What the scheduler reads of a message that may hold several."""
    encoder = ResponseEncoder(
        incarnation=2**63, tag_key=b"k" * 32, max_plans_in_flight=4, description=SimpleNamespace()
    )
    return decode_messages(encoder.encode(message).SerializeToString(), "executor:1")


def empty_result(step_id):
    """The result of a step that ran nothing."""
    return rows.StepResult(
        epoch=2,
        step_id=step_id,
        rows=column(),
        num_accepted=column(),
        token_ids=column(),
        finishes=np.array([], dtype=np.uint8),
        logprobs=(),
        faults=(),
        grant_hash=0,
        prompt_logprobs=(),
    )


def same(plan, **columns):
    """Whether columns of a message hold these values."""
    return {name: getattr(plan, name).tolist() for name in columns} == columns


def test_a_decoding_step_arrives():
    """Two columns, no more, in the steady state."""
    plan = to_executor(
        core.BatchPlan(
            incarnation=2**63, epoch=2, step_id=3, rows=column(0, 5), num_scheduled_tokens=column(1, 7), predicted_ns=9
        )
    )
    assert (plan.incarnation, plan.epoch, plan.step_id, plan.predicted_ns) == (2**63, 2, 3, 9)
    assert same(plan, rows=[0, 5], num_scheduled_tokens=[1, 7], num_draft_tokens=[])
    assert (plan.releases, plan.placements, plan.forget) == ((), (), ())


def test_the_drafts_of_a_plan_arrive():
    """As a column, so that an executor that does not draft can refuse them."""
    plan = to_executor(core.BatchPlan(1, 2, 3, column(0, 5), column(4, 1), 9, num_draft_tokens=column(3, 0)))
    assert same(plan, num_scheduled_tokens=[4, 1], num_draft_tokens=[3, 0])


def test_plans_and_results_that_travel_together_arrive_in_order():
    """As if each had come alone."""
    plans = [core.BatchPlan(1, 2, step_id, column(step_id), column(1), 9) for step_id in (3, 4)]
    steps = [executor_messages.StepDone(empty_result(step_id), rows.StepTimings(1, 2, 3, 4, 5)) for step_id in (3, 4)]
    done = executor_messages.StepsDone(tuple(steps))

    assert [(plan.step_id, plan.rows.tolist()) for plan in all_to_executor(*plans)] == [(3, [3]), (4, [4])]
    assert [result.step_id for result in all_to_scheduler(done)] == [3, 4]


def test_grants_tags_releases_and_forgotten_records_arrive():
    """Everything that changes state before the rows run."""
    plan = to_executor(
        core.BatchPlan(
            incarnation=1,
            epoch=1,
            step_id=1,
            rows=column(),
            num_scheduled_tokens=column(),
            predicted_ns=0,
            tags=(core.BlockTag(7, b"a" * 16), core.BlockTag(8, b"b" * 16)),
            releases=(core.Release(0, None), core.Release(1, core.FinalRelease(4, FinishReason.STOP))),
            grants=core.BlockGrants(column(3), column(1), column(11)),
            shared=core.BlockGrants(column(3), column(0), column(12)),
            forget=(RecordId("tenant", "old", 2),),
        )
    )
    assert same(plan.tags, block_ids=[7, 8])
    assert plan.tags.keys == b"a" * 16 + b"b" * 16
    assert plan.releases == (
        rows.Release(0, None),
        rows.Release(1, rows.FinalRelease(4, sampling_pb2.FINISH_REASON_STOP)),
    )
    assert same(plan.grants, rows=[3], indices=[1], block_ids=[11])
    assert same(plan.shared, rows=[3], indices=[0], block_ids=[12])
    assert plan.forget == (rows.RecordId("tenant", "old", 2),)


def test_a_placement_arrives():
    """A request in full, with what earlier attempts have put out."""
    request = make_request([1, 2, 3], request_id="r", tenant="t", seed=2**64 - 1, end_token_ids=(2,), num_logprobs=0)
    placement = core.NewRequest(
        row=4,
        request=request,
        attempt=2,
        output_token_ids=column(9),
        max_tokens=16,
        num_cached_tokens=2,
        num_prompt_cached_tokens=2,
        num_preemptions=1,
        num_executor_deaths=0,
        waited_s=0.25,
    )
    plan = core.BatchPlan(1, 1, 1, column(), column(), 0, placements=(placement,))

    (arrived,) = to_executor(plan).placements

    assert (arrived.row, arrived.attempt, arrived.max_tokens, arrived.num_cached_tokens) == (4, 2, 16, 2)
    assert arrived.record_id == rows.RecordId("t", "r")
    assert same(arrived, prompt_token_ids=[1, 2, 3], output_token_ids=[9])
    assert arrived.sampling == rows.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**64 - 1)
    assert (arrived.end_token_ids, arrived.num_logprobs, arrived.unsupported_fields) == ((2,), 0, ())
    context = plan_pb2.RequestContext.FromString(arrived.context)
    assert (context.num_preemptions, context.waited.ToMilliseconds()) == (1, 250)


def placed(request, output=()):
    """A first plan with this request on row 0, as the executor reads its placement."""
    placement = core.NewRequest(0, request, 1, column(*output), 16, 0, 0, 0, 0, 0.0)
    (arrived,) = to_executor(core.BatchPlan(1, 1, 1, column(), column(), 0, placements=(placement,))).placements
    return arrived


def test_everything_that_shapes_the_choice_of_a_token_arrives():
    """Penalties, biases, lists, the minimum with the model's end tokens that do not end, the prompt's alternatives."""
    request = make_request([1, 2], min_tokens=3, num_prompt_logprobs=0)
    sampling = replace(
        request.sampling,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias=((3, -2.0), (7, 100.0)),
        allowed_token_ids=(9, 4),
    )
    arrived = placed(
        replace(request, sampling=sampling, bad_words=((5,), (6, 7)), ignored_end_token_ids=(8,), end_token_ids=(2,))
    )
    assert arrived.sampling.presence_penalty == -0.5
    assert arrived.sampling.frequency_penalty == 0.25
    assert arrived.sampling.repetition_penalty == 1.5
    assert arrived.sampling.logit_bias == ((3, -2.0), (7, 100.0))
    assert arrived.sampling.allowed_token_ids == (9, 4)
    assert (arrived.min_tokens, arrived.end_token_ids, arrived.ignored_end_token_ids) == (3, (2,), (8,))
    assert arrived.bad_words == ((5,), (6, 7))
    assert (arrived.num_prompt_logprobs, arrived.unsupported_fields) == (0, ())


def test_what_shapes_nothing_does_not_travel():
    """The defaults mean the same on both sides; a prompt whose log-probabilities the client has is not asked again."""
    arrived = placed(make_request([1, 2]))
    sampling = arrived.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (sampling.logit_bias, sampling.allowed_token_ids, arrived.bad_words) == ((), (), ())
    assert (arrived.min_tokens, arrived.num_prompt_logprobs) == (0, None)
    assert placed(make_request([1, 2], num_prompt_logprobs=2), output=[5]).num_prompt_logprobs is None


def test_hello_arrives():
    """The claim that the executor compares."""
    hello = to_executor(scheduler_messages.Hello("scheduler", 7, address="host:1"))
    assert (hello.claim.term, hello.claim.scheduler_id, hello.claim.address) == (7, "scheduler", "host:1")
    assert executor_messages.PROTOCOLS.pick(hello.protocols) in scheduler_messages.PROTOCOLS
    assert hello.approach is Approach.WAIT


def test_who_holds_the_executor_arrives():
    """With the address that its own hello said."""
    arrived = to_scheduler(executor_messages.WaitingInLine(Claim(7, "scheduler", "host:1")))
    assert arrived == scheduler_messages.WaitingInLine(Holder("scheduler", 7, "host:1"))


def test_a_takeover_and_an_odd_range_of_protocols_arrive():
    """As the scheduler means them; whether they suit is for the executor to say."""
    hello = to_executor(scheduler_messages.Hello("scheduler", 7, scheduler_messages.ProtocolRange(2, 5), takeover=True))
    assert hello.approach is Approach.TAKE_OVER
    assert hello.protocols == executor_messages.ProtocolRange(2, 5)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_generation_default_travels_from_the_model_to_the_client(field):
    """Each alone, the others unset."""
    special = SpecialTokens(None, None, None, (), add_bos=False)
    bundle = make_bundle(b"{}", None, special, GenerationDefaults(**{field: 1}))
    (part,) = tokenizer_parts(SimpleNamespace(tokenizer=bundle))

    source, is_last = decode_tokenizer_part(part.SerializeToString())
    shown = api_wire.model(served_model(source)).default_sampling

    assert is_last
    assert {name: value for name, value in asdict(source.defaults).items() if value is not None} == {field: 1}
    assert [(named.name, value) for named, value in shown.ListFields()] == [(field, 1)]


def test_a_result_arrives():
    """Tokens, finishes, log-probabilities, failures and timings."""
    result = rows.StepResult(
        epoch=2,
        step_id=3,
        rows=column(0, 5, 6),
        num_accepted=column(1, 0, 0),
        token_ids=column(42),
        finishes=np.array([rows.RowFinish.END_TOKEN, rows.RowFinish.GOES_ON, rows.RowFinish.ERROR], dtype=np.uint8),
        logprobs=(rows.RowLogprobs(0, 42, TokenLogprobs(-0.5, (42, 7), (-0.5, -1.0))),),
        faults=(rows.RowFault(6, NumericError("row 6")),),
        grant_hash=2**64 - 1,
        prompt_logprobs=(rows.RowPromptLogprobs(5, 3, column(8, 9), PROMPT_LOGPROBS),),
    )
    timings = rows.StepTimings(waited_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4, idle_ns=5)

    arrived = to_scheduler(executor_messages.StepsDone((executor_messages.StepDone(result, timings),)))

    assert (arrived.incarnation, arrived.epoch, arrived.step_id, arrived.grant_hash) == (2**63, 2, 3, 2**64 - 1)
    assert same(arrived, rows=[0, 5, 6], num_accepted=[1, 0, 0], token_ids=[42], finishes=[1, 0, 4])
    assert arrived.logprobs == {0: (core.TokenLogprobs(42, -0.5, ((42, -0.5), (7, -1.0))),)}
    assert "row 6" in arrived.errors[6].message
    assert arrived.prompt_logprobs.keys() == {5}
    assert arrived.prompt_logprobs[5].of(3, column(8, 9)) == (
        core.TokenLogprobs(8, -0.5, ((1, -0.25), (2, -2.0))),
        core.TokenLogprobs(9, -1.5, ((3, -0.75), (4, -4.0))),
    )
    assert arrived.timings == core.StepTimings(1, 2, 3, 4, 5)


def test_a_snapshot_arrives():
    """A row and a record, and the tags of the prefix cache."""
    state = rows.RowState(
        record_id=rows.RecordId("t", "r", index=3),
        row=0,
        attempt=2,
        prompt_token_ids=column(1, 2),
        output_token_ids=column(3),
        num_computed_tokens=2,
        block_ids=column(8),
        finish=rows.RowFinish.LENGTH,
        released=rows.FinalRelease(1, sampling_pb2.FINISH_REASON_LENGTH),
        max_tokens=1,
        sampling_message=b"",
        end_token_ids=(2,),
        context=b"",
        logprobs=OutputLogprobs(
            0, np.array([-0.5], np.float32), np.array([[3, 4]], np.int32), np.array([[-0.5, -1.5]], np.float32)
        ),
    )
    part = SnapshotPart(states=(state,), tags=rows.BlockTags(column(8), b"a" * 16), is_last=True)

    arrived = to_scheduler(part)

    (row_part,) = arrived.rows
    row = row_part.row
    assert (row.key, row.row, row.attempt) == (RecordId("t", "r", 3), 0, 2)
    assert row.logprobs.of(0, row.output_token_ids) == (core.TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.5))),)
    assert same(row, prompt_token_ids=[1, 2], output_token_ids=[3], block_ids=[8])
    assert (row.num_computed_tokens, row.finish) == (2, core.RowFinish.LENGTH)
    assert row.released == core.FinalRelease(1, FinishReason.LENGTH)
    assert (arrived.tags, arrived.is_last) == ((core.BlockTag(8, b"a" * 16),), True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (core.RowFinish, plan_pb2.RowFinish),
        (rows.RowFinish, plan_pb2.RowFinish),
        (FinishReason, sampling_pb2.FinishReason),
    ],
)
def test_enums_have_the_protocols_numbers(ours, theirs):
    """They are cast, not translated, on the wire."""
    names = {value: name for name, value in theirs.items()}
    assert [value.value for value in ours] == sorted(names)
    for value in ours:
        assert value.value == 0 or names[value.value].endswith(value.name)
