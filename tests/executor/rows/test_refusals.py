"""Plans that cannot be are refused by name and leave the rows as they were; requests that cannot be fail alone."""

import math
from dataclasses import replace

import pytest

from executor_rig.hash_runner import HashRunner
from executor_rig.plans import GREEDY, cells, int32, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import BlockTags, RowFinish
from paceline_executor.errors import PlanError, PlanFault, UnsupportedPlanError
from paceline_executor.limits import MAX_CONTEXT_BYTES, MAX_END_TOKENS, RowLimits
from paceline_executor.rows.table import RowTable

# What is refused comes to no runner.
SEEN = ["seen", "hidden", pytest.param("twin", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.usefixtures("seen_or_hidden"),
    pytest.mark.parametrize("seen_or_hidden", SEEN, indirect=True, scope="module"),
]

LIMITS = RowLimits(
    num_rows=4, max_model_len=16, max_num_batched_tokens=20, num_blocks=12, block_size=4, vocab_size=1000
)
KEY = bytes(range(16))


@pytest.fixture
def engine():
    """Row 0 decodes with blocks 0 and 1; row 1 shares tagged block 0 and writes to block 2; row 3 has ended.

    There is a record named old.
    """
    engine = SteppingEngine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))
    engine.execute(plan(place=[placement(0, [1], name="old")]))
    engine.execute(plan(finish=[(0, 0)]))
    first = placement(0, [1, 2, 3, 4, 5])
    engine.execute(plan([(0, 5)], place=[first], grants=[(0, 0, 0), (0, 1, 1)]))
    second, ended = placement(1, [1, 2, 3, 4, 6], num_cached_tokens=4), placement(3, [1], max_tokens=1)
    engine.execute(
        plan(
            [(1, 1), (3, 1)],
            step_id=2,
            tags=[(0, KEY)],
            place=[second, ended],
            shared=[(1, 0, 0)],
            grants=[(1, 1, 2), (3, 0, 3)],
        )
    )
    return engine


def _long_prompt(num_cached_tokens=0):
    """Nine tokens for row 2, in three blocks."""
    return placement(2, list(range(9)), num_cached_tokens=num_cached_tokens)


MALFORMED = {
    "a row out of range is scheduled": (plan([(4, 1)]), PlanFault.ROW_OUT_OF_RANGE),
    "a negative row is scheduled": (plan([(-1, 1)]), PlanFault.ROW_OUT_OF_RANGE),
    "a free row is scheduled": (plan([(2, 1)]), PlanFault.ROW_NOT_IN_USE),
    "a row is scheduled twice": (plan([(0, 1), (0, 1)]), PlanFault.ROW_TWICE),
    "a row is scheduled with no tokens": (plan([(0, 0)]), PlanFault.TOKENS_UNKNOWN),
    "a row is scheduled with a negative number": (plan([(0, -1)]), PlanFault.TOKENS_UNKNOWN),
    "a row is scheduled beyond its known tokens": (plan([(0, 2)]), PlanFault.TOKENS_UNKNOWN),
    "a step is too large": (plan([(0, 1), (1, 20)]), PlanFault.TOO_MANY_TOKENS),
    "a step is larger than int32": (plan([(0, 2**31 - 1), (1, 2**31 - 1)]), PlanFault.TOO_MANY_TOKENS),
    "scheduled columns differ in length": (
        replace(plan([(0, 1)]), num_scheduled_tokens=int32([1, 1])),
        PlanFault.COLUMN_LENGTH,
    ),
    "grant columns differ in length": (
        replace(plan(), grants=replace(cells([(0, 2, 4)]), indices=int32([]))),
        PlanFault.COLUMN_LENGTH,
    ),
    "copy columns differ in length": (
        replace(
            plan(grants=[(0, 2, 4)], copies=[(0, 4)]), copies=replace(plan(copies=[(0, 4)]).copies, sources=int32([]))
        ),
        PlanFault.COLUMN_LENGTH,
    ),
    "tag keys are cut short": (replace(plan(), tags=BlockTags(int32([1]), bytes(15))), PlanFault.COLUMN_LENGTH),
    "a tag is for a block out of range": (plan(tags=[(12, KEY)]), PlanFault.BLOCK_OUT_OF_RANGE),
    "a block out of range is granted": (plan(grants=[(0, 2, 12)]), PlanFault.BLOCK_OUT_OF_RANGE),
    "a block out of range is shared": (plan(shared=[(0, 2, -1)]), PlanFault.BLOCK_OUT_OF_RANGE),
    "a block out of range is copied": (plan(grants=[(0, 2, 4)], copies=[(99, 4)]), PlanFault.BLOCK_OUT_OF_RANGE),
    "a copy goes to a block that is not granted": (plan(copies=[(0, 4)]), PlanFault.COPY_NOT_GRANTED),
    "a block in a table is granted": (plan(grants=[(0, 2, 2)]), PlanFault.BLOCK_IN_USE),
    "a shared block is granted": (plan(grants=[(0, 2, 0)]), PlanFault.BLOCK_IN_USE),
    "a block is granted twice": (plan(grants=[(0, 2, 4), (1, 2, 4)]), PlanFault.BLOCK_IN_USE),
    "a block is granted and shared": (plan(grants=[(0, 2, 4)], shared=[(1, 2, 4)]), PlanFault.BLOCK_IN_USE),
    "a replaced block comes with a free row": (
        plan([(2, 1)], grants=[(1, 1, 4)], copies=[(2, 4)]),
        PlanFault.ROW_NOT_IN_USE,
    ),
    "a shared block comes with a free row": (plan([(2, 1)], shared=[(0, 2, 0)]), PlanFault.ROW_NOT_IN_USE),
    "a block takes the place of computed tokens": (plan(grants=[(0, 0, 4)]), PlanFault.CONTENTS_LOST),
    "a block takes the place of computed tokens as a copy of others": (
        plan(grants=[(0, 1, 4)], copies=[(0, 4)]),
        PlanFault.CONTENTS_LOST,
    ),
    "a shared block takes the place of computed tokens": (plan(shared=[(0, 1, 0)]), PlanFault.CONTENTS_LOST),
    "a grant leaves a gap": (plan(grants=[(0, 3, 4)]), PlanFault.BLOCK_INDEX),
    "a grant lies beyond the context": (plan(grants=[(0, 4, 4)]), PlanFault.BLOCK_INDEX),
    "a cell is granted twice": (plan(grants=[(0, 2, 4), (0, 2, 5)]), PlanFault.BLOCK_INDEX),
    "a free row is given a block": (plan(grants=[(2, 0, 4)]), PlanFault.ROW_NOT_IN_USE),
    "a free row is given a shared block": (plan(shared=[(2, 0, 0)]), PlanFault.ROW_NOT_IN_USE),
    "a row out of range is given a block": (plan(grants=[(9, 0, 4)]), PlanFault.ROW_OUT_OF_RANGE),
    "a row runs without a block for its tokens": (
        plan([(2, 5)], place=[_long_prompt()], grants=[(2, 0, 4)]),
        PlanFault.BLOCK_MISSING,
    ),
    "a row would write to a shared block": (
        plan([(2, 1)], place=[_long_prompt()], shared=[(2, 0, 0)]),
        PlanFault.BLOCK_SHARED,
    ),
    "cached tokens lie in blocks that were not given": (
        plan(place=[_long_prompt(8)], shared=[(2, 0, 0)]),
        PlanFault.BLOCK_MISSING,
    ),
    "all tokens of a placement are cached": (plan(place=[_long_prompt(9)]), PlanFault.CACHED_TOKENS),
    "an occupied row is placed": (plan(place=[placement(0, [1], name="other")]), PlanFault.ROW_IN_USE),
    "two requests are placed on one row": (
        plan(place=[placement(2, [1], name="a"), placement(2, [1], name="b")]),
        PlanFault.ROW_IN_USE,
    ),
    "a row is used again before its release is confirmed": (
        plan(finish=[(0, 1)], place=[placement(0, [1], name="other")]),
        PlanFault.ROW_IN_USE,
    ),
    "a row out of range is placed": (plan(place=[placement(4, [1])]), PlanFault.ROW_OUT_OF_RANGE),
    "a request is placed twice": (plan(place=[placement(2, [1], name="request-0")]), PlanFault.REQUEST_ALREADY_PLACED),
    "a request has no id": (
        plan(place=[replace(placement(2, [1]), record_id=replace(placement(2, [1]).record_id, request_id=""))]),
        PlanFault.RECORD_ID,
    ),
    "a request's name is too long": (plan(place=[placement(2, [1], name="x" * 129)]), PlanFault.RECORD_ID),
    "a free row is released": (plan(preempt=[2]), PlanFault.ROW_NOT_IN_USE),
    "a row is released twice": (plan(preempt=[0, 0]), PlanFault.ROW_NOT_IN_USE),
    "a row out of range is released": (plan(preempt=[2**32 - 1]), PlanFault.ROW_OUT_OF_RANGE),
    "a release counts more tokens than there are": (plan(finish=[(0, 2)]), PlanFault.RELEASE_BEYOND_OUTPUT),
    "a released row is scheduled": (plan([(0, 1)], preempt=[0]), PlanFault.ROW_NOT_IN_USE),
}


def _picture(table):
    """Everything observable about a table."""
    tags = table.tags()
    states = [repr(state) for state in table.states()]
    return states, tags.block_ids.tolist(), tags.keys, table.num_granted_blocks, table.num_records


@pytest.mark.parametrize(("malformed", "fault"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_plan_is_named_and_changes_nothing(engine, malformed, fault):
    before = _picture(engine.table)
    wants_more = replace(malformed, forget=plan(forget=["nobody", "old"]).forget)
    if not malformed.tags.block_ids.size:
        wants_more = replace(wants_more, tags=plan(tags=[(1, KEY)]).tags)
    if not malformed.releases:
        wants_more = replace(wants_more, releases=plan(preempt=[3]).releases)

    with pytest.raises(PlanError) as refusal:
        engine.execute(wants_more)

    assert refusal.value.fault is fault
    assert refusal.value.reason == f"PLAN_{fault}"
    assert _picture(engine.table) == before
    assert engine.execute(plan([(0, 1), (1, 1)], step_id=3)).num_accepted.tolist() == [1, 1]


LATER_FIELDS = {
    "num_draft_tokens": {"num_draft_tokens": int32([1])},
    "adapter_loads": {"unsupported_fields": ("adapter_loads",)},
    "imports": {"unsupported_fields": ("imports", "exports")},
}


@pytest.mark.parametrize("field", LATER_FIELDS)
def test_what_a_later_version_does_is_refused_by_name_and_changes_nothing(engine, field):
    before = _picture(engine.table)
    with pytest.raises(UnsupportedPlanError, match=f"^{field} is not supported") as refusal:
        engine.execute(replace(plan([(0, 1)], preempt=[3]), **LATER_FIELDS[field]))

    assert refusal.value.metadata == {"field": field}
    assert _picture(engine.table) == before


REFUSED_REQUESTS = {
    "sampling.temperature": placement(2, [1], sampling=replace(GREEDY, temperature=math.nan)),
    "sampling.top_k": placement(2, [1], sampling=replace(GREEDY, top_k=1001)),
    "sampling.top_p": placement(2, [1], sampling=replace(GREEDY, top_p=0.0)),
    "sampling.min_p": placement(2, [1], sampling=replace(GREEDY, min_p=1.5)),
    "sampling.n": placement(2, [1], unsupported_fields=["sampling.n", "sampling.bad_words"]),
    "prompt_token_ids": placement(2, [1, 1000]),
    "output_token_ids": placement(2, [1], output=[-1]),
    "end_token_ids": placement(2, [1], end_token_ids=[1000]),
    "max_tokens": placement(2, [1], output=[5, 6], max_tokens=2),
    "num_logprobs": placement(2, [1], num_logprobs=21),
    "num_prompt_logprobs": placement(2, [1], num_prompt_logprobs=21),
    "num_cached_tokens": placement(2, [1, 2, 3, 4, 5], num_prompt_logprobs=0, num_cached_tokens=4),
    "ignored_end_token_ids": placement(2, [1], ignored_end_token_ids=[1000]),
    "bad_word_token_ids": placement(2, [1], bad_words=[[1], []]),
    "context": placement(2, [1], context=bytes(MAX_CONTEXT_BYTES + 1)),
}


RULES_OUT_OF_RANGE = [
    *[("sampling.presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, math.nan, math.inf)],
    *[("sampling.frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1, math.nan, -math.inf)],
    *[("sampling.repetition_penalty", {"repetition_penalty": value}) for value in (0.0, -1.0, 10.1, math.nan)],
    *[("sampling.logit_bias", {"logit_bias": ((1, value),)}) for value in (-100.1, 100.1, math.nan)],
    ("sampling.logit_bias", {"logit_bias": ((1000, 0.0),)}),
    ("sampling.logit_bias", {"logit_bias": ((1, 0.0),) * 1025}),
    ("sampling.allowed_token_ids", {"allowed_token_ids": (-1,)}),
    ("sampling.allowed_token_ids", {"allowed_token_ids": (1,) * 4097}),
]


@pytest.mark.parametrize(("field", "rules"), RULES_OUT_OF_RANGE)
def test_a_rule_out_of_range_fails_its_request(engine, field, rules):
    request = placement(2, [1], sampling=replace(GREEDY, **rules))
    result = engine.execute(plan([(2, 1)], step_id=3, place=[request], grants=[(2, 0, 5)]))
    assert [(error.row, error.field) for error in result.errors] == [(2, field)]


@pytest.mark.parametrize(("field", "request_"), REFUSED_REQUESTS.items(), ids=REFUSED_REQUESTS)
def test_a_request_that_cannot_run_fails_alone_and_names_the_field(engine, field, request_):
    result = engine.execute(plan([(0, 1), (2, 1)], step_id=3, place=[request_], grants=[(2, 0, 5)]))

    assert [(error.row, error.field) for error in result.errors] == [(2, field)]
    assert field in result.errors[0].message
    assert result.num_accepted.tolist() == [1, 0]
    assert result.finishes.tolist() == [RowFinish.GOES_ON, RowFinish.ERROR]
    engine.execute(plan(step_id=4, finish=[(2, request_.output_token_ids.size)]))
    assert engine.table.num_rows_in_use == 3


def test_nothing_oversized_is_kept_of_a_request_that_cannot_run(engine):
    lists = replace(GREEDY, allowed_token_ids=(1,) * 100_000, logit_bias=((1, 0.5),) * 100_000)
    oversized = placement(2, [1], context=bytes(2 * MAX_CONTEXT_BYTES), end_token_ids=[1] * 1000, sampling=lists)
    engine.execute(plan(step_id=3, place=[oversized]))

    state = next(state for state in engine.table.states() if state.row == 2)
    assert (state.context, state.sampling, len(state.end_token_ids)) == (b"", GREEDY, MAX_END_TOKENS)


@pytest.mark.parametrize("num_tokens", [0, 16, 17, 40])
def test_a_prompt_that_is_empty_or_leaves_no_room_fails_alone(engine, num_tokens):
    """The context holds 16 tokens, one of which has to be output."""
    result = engine.execute(plan(step_id=3, place=[placement(2, [1] * num_tokens)]))

    assert [error.field for error in result.errors] == ["prompt_token_ids"]


def test_the_largest_request_that_fits_runs(engine):
    """15 prompt tokens and one of output; every sampling value at its edge."""
    edge = SamplingParams(
        temperature=100.0,
        top_k=1000,
        top_p=1.0,
        min_p=1.0,
        seed=2**64 - 1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=10.0,
        logit_bias=tuple((token_id % 1000, -100.0) for token_id in range(1024)),
        allowed_token_ids=(0, 999) * 2048,
    )
    request = placement(
        2,
        [999] * 15,
        sampling=edge,
        max_tokens=2**32 - 1,
        end_token_ids=[0, 999],
        num_logprobs=20,
        min_tokens=0,
        num_prompt_logprobs=20,
        bad_words=[[1] * 10] * 256 + [[1] * 11] * 512,
    )
    blocks = [(2, index, 4 + index) for index in range(4)]

    result = engine.execute(plan([(2, 15)], step_id=3, place=[request], grants=blocks))

    assert result.errors == ()
    assert result.num_accepted.tolist() == [1]
