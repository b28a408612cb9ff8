"""Drafts on a device, on its twin: with steps in flight every request gets, bit for bit, what plain decoding gives it.

The other side is the CPU runner without drafts, each request alone.
"""

from collections import Counter, deque
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.device_numerics import TWIN_NUMERICS
from paceline_executor.link.engine import Engine
from paceline_executor.models.device_eagle3 import DeviceEagle3Head
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.rows.drafts import granted_drafts
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.cuda import DeviceRunner
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.drafts import LookupDrafter, launching
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.testing.drafters import KnowingDrafter, UselessDrafter, wanted_drafts
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint
from paceline_executor.testing.plans import GREEDY, placement, plan
from paceline_executor.testing.random_plans import LIMITS as PLAIN_LIMITS
from paceline_executor.testing.random_plans import Request, Scheduler
from paceline_executor.testing.stepping import outcome_of
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.attention import Splits
from random_requests import FEW, Outcome, asking, outcome_alone

MAX_DRAFTS = 5
LIMITS = replace(PLAIN_LIMITS, max_num_draft_tokens=MAX_DRAFTS)
CONFIG = replace(TINY_CONFIG, vocab_size=LIMITS.vocab_size)
CHECKPOINT = RandomCheckpoint(CONFIG)
MODEL = LlamaModel(HostWeights(CHECKPOINT), LIMITS.max_model_len)
BUCKETS = buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens, MAX_DRAFTS)
CPU = CpuRunner(CHECKPOINT, num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, num_threads=1)


class ChosenDrafter:
    """On the device what `inner`, a drafter of the host, finds among the tokens that the device has by then."""

    inner = None

    def draft(self, rows, plan):
        """Write the drafts that there are tokens for."""
        known, held = rows.draws.num_known.numpy(), rows.state.num_held.numpy()
        tokens, computed = rows.state.token_ids.numpy(), rows.state.num_computed.numpy()
        for row, planned in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if row < 0 or rows.state.finish[row] or planned <= known[row] - computed[row]:
                continue
            num_wanted = planned - (known[row] - computed[row])
            (found,) = self.inner.draft(wanted_drafts([(row, tokens[row, : known[row]].tolist(), num_wanted)]))
            is_bad = (found < 0) | (found >= LIMITS.vocab_size)
            found = (found[: is_bad.argmax()] if is_bad.any() else found)[:num_wanted]
            tokens[row, known[row] : known[row] + found.size] = found
            held[row] = known[row] + found.size


@cache
def device_runner(buckets, drafting):
    """A warm runner, and its device."""
    device = TwinDevice()
    geometry = kv_geometry(CONFIG, LIMITS.num_blocks, LIMITS.block_size, FLOAT32_NUMERICS)
    cache_of_all = allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv)
    runner = DeviceRunner(device, MODEL, cache_of_all, geometry, LIMITS, buckets=buckets, drafting=drafting)
    runner.warm_up()
    return runner, device


def draft_model(checkpoint):
    """Drafts by this model, whose KV cache is its own."""
    model, max_len = LlamaModel(HostWeights(checkpoint), LIMITS.max_model_len), LIMITS.max_model_len
    device = torch.device("cpu")
    return drafting_by_model(model, checkpoint.config, TWIN_NUMERICS, LIMITS, max_len, Splits.EVEN, device)


def head():
    """Drafts by a head of random weights, of the target's vocabulary."""
    layer = replace(CONFIG, num_layers=1)
    config = Eagle3Config(layer, CONFIG.vocab_size, CONFIG.hidden_size, (1,), norm_before_residual=True)
    random = torch.Generator().manual_seed(0)
    of_head = DeviceEagle3Head(
        config,
        lambda name: torch.randn(config.tensor_shapes()[name], generator=random) / 8,
        MODEL.embed,
        LIMITS.max_model_len,
    )
    return drafting_by_head(of_head, None, TWIN_NUMERICS, LIMITS, Splits.EVEN)


CHOSEN = ChosenDrafter()
OF_CHOSEN, LOOKUP = launching(CHOSEN, MAX_DRAFTS), launching(LookupDrafter(MAX_DRAFTS), MAX_DRAFTS)
TARGET_ITSELF = draft_model(CHECKPOINT)  # so all its drafts are right
OF_DEVICE = {"lookup": LOOKUP, "itself": TARGET_ITSELF, "head": head()}


class Ahead:
    """Requests served by a device that drafts: planned, launched and landed at random."""

    def __init__(self, wanted, seed, buckets, drafting):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        runner, self.device = device_runner(buckets, drafting)
        self.device.late_by(seed)
        self.engine = Engine(RowTable(LIMITS), runner)
        self.requests = [Request(f"request-{i}", *one) for i, one in enumerate(wanted)]
        self.kinds = [self.random.randrange(60) for _ in wanted]
        self.scheduler = Scheduler(self.random, self.requests, MAX_DRAFTS)
        self.outcomes = {request.name: Outcome() for request in self.requests}
        self.in_flight = deque()

    def run(self, failing, reached):
        """Until every request is done."""
        for _ in range(2000):
            if self.scheduler.is_done and not self.in_flight:
                return
            if len(self.in_flight) < self.engine.max_in_flight and self.random.random() < 0.75:
                planned = self.scheduler.plan()
                placed = tuple(asking(one, self.kind_of(one)) for one in planned.new_requests)
                self.launch(replace(planned, new_requests=placed), failing, reached)
            elif self.in_flight:
                self.land(reached)

    def kind_of(self, placed):
        """What its request asks for."""
        return self.kinds[[request.name for request in self.requests].index(placed.record_id.request_id)]

    def launch(self, planned, failing, reached):
        """Launch a plan; where it needs what has not landed, that lands first."""
        while not self.engine.can_launch(planned):
            if not self.land(reached):
                return  # the plan is of an epoch that is over
        self.device.fail_next = MemoryError("of the test") if self.random.random() < failing else None
        self.in_flight.append((planned, self.engine.launch(planned)))
        self.device.fail_next = None
        is_mixed = (
            planned.num_draft_tokens.any() and (planned.num_scheduled_tokens - planned.num_draft_tokens > 1).any()
        )
        reached["chunks beside drafts"] += bool(is_mixed)
        if len(self.in_flight) == 2:
            reached["drafts behind drafts"] += all(each.num_draft_tokens.any() for each, _ in self.in_flight)

    def land(self, reached):
        """Land the oldest step; says whether it did not fail."""
        planned, ticket = self.in_flight.popleft()
        result = outcome_of(lambda: self.engine.collect(ticket))
        if result is None:
            reached["failed"] += 1
            self.in_flight.clear()
            self.scheduler.rebuild(self.engine.table.states())
            return False
        tokens = iter(result.token_ids.tolist())
        for row, count in zip(result.rows.tolist(), result.num_accepted.tolist(), strict=True):
            name = {**self.scheduler.running, **self.scheduler.leaving}[row].name
            if not self.outcomes[name].finish:
                self.outcomes[name].take(result, row, [next(tokens) for _ in range(count)])
        reached["verified"] += int(result.num_draft_tokens.sum())
        reached["accepted"] += int(np.maximum(result.num_accepted - 1, 0).sum())
        self.scheduler.take(planned, result)
        return True


prompts = st.lists(st.sampled_from(FEW), min_size=1, max_size=10)
requests = st.lists(st.tuples(prompts, st.integers(1, 14), st.integers(0, 49)), min_size=2, max_size=6)


def inner_drafters(answers, chance):
    """Drafters of the host: right, erring at times, always wrong, of no use."""
    return {
        "right": KnowingDrafter(answers, lambda num_wanted: num_wanted),
        "erring": KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted)),
        "wrong": KnowingDrafter(answers, lambda _: 0),
        "useless": UselessDrafter(chance, LIMITS.vocab_size),
    }


@pytest.mark.hypothesis
@pytest.mark.parametrize("buckets", [BUCKETS, Buckets([])], ids=["captured", "launched one by one"])
def test_a_device_that_drafts_says_what_plain_decoding_says(buckets):
    """Greedy and seeded, with rules, log-probabilities, chunks in the same step, shared blocks, preemption, failed
    launches; two steps in flight that both verify drafts; whoever drafts.
    """
    reached = {kind: Counter() for kind in ("right", "erring", "wrong", "useless", "lookup", "itself", "head")}

    @settings(max_examples=settings.default.max_examples // 10)
    @given(requests, st.integers(0, 2**32))
    def nobody_notices(wanted, seed):
        expected = None
        for kind, seen in reached.items():
            ahead = Ahead(wanted, seed, buckets, OF_DEVICE.get(kind, OF_CHOSEN))
            if expected is None:
                expected = [vars(outcome_alone(CPU, *each)) for each in zip(ahead.requests, ahead.kinds, strict=True)]
                answers = [of[0] + one["tokens"] for of, one in zip(wanted, expected, strict=True)]
            CHOSEN.inner = inner_drafters(answers, Random(seed)).get(kind)  # noqa: S311
            ahead.run(0.05, seen)
            assert [vars(outcome) for outcome in ahead.outcomes.values()] == expected, kind

    nobody_notices()
    assert reached["right"]["accepted"] >= 20, reached
    assert reached["erring"]["verified"] > reached["erring"]["accepted"] >= 5, reached
    assert reached["wrong"]["verified"] >= 20, reached
    assert reached["lookup"]["accepted"] >= 5, reached
    assert reached["itself"]["verified"] == reached["itself"]["accepted"] >= 20, reached
    assert reached["head"]["verified"] > reached["head"]["accepted"] >= 5, reached
    for branch in ("chunks beside drafts", "drafts behind drafts", "failed"):
        assert sum(seen[branch] for seen in reached.values()) >= 5, reached


def one_row(num_drafts, prompt, drafting, **asked):
    """Results of a row alone whose steps have so many drafts, until it ends, and the sizes they were launched in."""
    runner, _ = device_runner(BUCKETS, drafting)
    engine, results, sizes, num_tokens = Engine(RowTable(LIMITS), runner), [], [], len(prompt)
    contents = {"place": [placement(0, prompt, **asked)], "grants": [(0, cell, cell) for cell in range(6)]}
    launch = runner._steps.launch
    runner._steps.launch = lambda size, **kinds: [sizes.append(size), launch(size, **kinds)][1]
    while not results or not results[-1].finishes[0]:
        room = len(prompt) + min(asked["max_tokens"], 99) - sum(int(one.num_accepted[0]) for one in results)
        drafts = min(num_drafts, room - len(prompt) - 1) if results else 0
        planned = plan([(0, num_tokens + drafts)], drafts=[drafts] if drafts else (), **contents)
        results.append(engine.collect(engine.launch(planned)))
        contents, num_tokens = {}, 1
    runner._steps.launch = launch
    return results, sizes


def tokens_of(results):
    """All that a row was given."""
    return [token for one in results for token in one.token_ids.tolist()]


def test_a_row_fails_at_the_token_at_which_it_fails_without_drafts():
    """Nothing is left after 3, which is drafted and right: its step brings it, and the next one the failure."""
    sampling = replace(GREEDY, allowed_token_ids=FEW, logit_bias=((3, 1.5),), repetition_penalty=1.5)
    asked = {"max_tokens": 20, "sampling": sampling, "bad_words": [(3, token) for token in FEW]}
    plain, _ = one_row(0, [1, 2], OF_CHOSEN, **asked)
    assert ([error.reason for error in plain[-1].errors], tokens_of(plain)[-1]) == (["NO_TOKEN_LEFT"], 3)

    CHOSEN.inner = KnowingDrafter([[1, 2, *tokens_of(plain), 0, 0, 0]], lambda num_wanted: num_wanted)
    drafted, _ = one_row(4, [1, 2], OF_CHOSEN, **asked)
    assert tokens_of(drafted) == tokens_of(plain)
    assert (drafted[-2].errors, drafted[-1].errors) == ((), plain[-1].errors)
    assert drafted[-2].num_accepted[0] > 1


def test_a_step_that_verifies_is_replayed_in_its_size():
    sampling = replace(GREEDY, allowed_token_ids=(1,))  # whose lookups are all right
    for num_drafts, longest, num_tokens in ((1, 4, 2), (2, 4, 4), (3, 4, 4), (5, 6, 6)):
        results, sizes = one_row(num_drafts, [1, 1, 1], LOOKUP, max_tokens=2 + num_drafts, sampling=sampling)
        assert [one.num_accepted[0] for one in results] == [1, 1 + num_drafts]
        assert (sizes[1].num_rows, sizes[1].num_tokens, sizes[1].max_query_len) == (1, num_tokens, longest)
        assert sizes[1] in list(BUCKETS)


def test_nobody_looks_for_drafts_in_a_step_that_has_none(monkeypatch):
    device_runner(BUCKETS, LOOKUP)  # captures look, too
    looked = []
    monkeypatch.setattr(LookupDrafter, "draft", lambda *_: looked.append(True))
    for num_drafts, times in ((0, 0), (2, 1)):
        looked.clear()
        results, sizes = one_row(num_drafts, [1] * 8, LOOKUP, max_tokens=2)
        assert (len(results), sizes[0].max_query_len, len(looked)) == (2, None, 0)
        results, _ = one_row(num_drafts, [1] * 8, LOOKUP, max_tokens=4)
        assert len(looked) == times * (len(results) - 2)


def test_lookups_know_tokens_that_were_computed_for_another_row():
    """What follows 1 2 in the cached part of the prompt is drafted; the device was never given it to compute."""
    runner, _ = device_runner(BUCKETS, LOOKUP)
    engine = Engine(RowTable(LIMITS), runner)
    cells, known = [(0, cell, cell) for cell in range(6)], [1, 2, 9, 9, 9, 9, 9, 9, 9, 1]
    placed = placement(0, known, output=[2], num_cached_tokens=8, max_tokens=9)
    result = engine.collect(engine.launch(plan([(0, 3 + 4)], drafts=[4], place=[placed], grants=cells)))
    assert result.num_draft_tokens.tolist() == [4]
    assert runner._rows.state.token_ids[0, 11:13].tolist()[1:] == [9]


def test_no_more_is_drafted_than_a_step_may_draw():
    limits = replace(LIMITS, max_num_draft_tokens=MAX_DRAFTS)
    drafts = plan([(row, 6) for row in range(3)], drafts=[5, 5, 5])
    assert granted_drafts(drafts, np.arange(3), limits).tolist() == [5, 5, 5]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 10)
        assert granted_drafts(drafts, np.arange(3), limits).tolist() == [5, 2, 0]
        assert granted_drafts(drafts, np.array([0, 2]), limits).tolist() == [5, 3]
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 3)
        assert granted_drafts(drafts, np.arange(3), limits) is None
