"""Drafts in virtual time: those of many runs with faults, and how many there are by how busy an executor is."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline_scheduler.core.planning.speculation import Acceptance
from simulation.audit import PlanAudit
from simulation.run import run_seed, run_world
from simulation.scenario import PlannedRules, Reproducibility, draw_scenario
from simulation.trace import Trace
from simulation.world import World

NUM_BUSY = 24
MAX_DRAFTS = 3


@pytest.mark.parametrize(
    ("is_on_twins", "num_seeds"),
    [(False, 10), (True, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(False, 40), (True, 12)])],
)
def test_drafts_are_among_what_is_tried_right_ones_and_wrong_ones(is_on_twins, num_seeds, monkeypatch):
    observe, seen = Acceptance.observe, Counter()

    def observe_and_count(acceptance, rows, num_verified, num_right):
        seen.update(zip(num_verified.tolist(), num_right.tolist(), strict=True))
        observe(acceptance, rows, num_verified, num_right)

    monkeypatch.setattr(Acceptance, "observe", observe_and_count)
    for seed in range(num_seeds):
        assert not run_seed(seed, is_on_twins=is_on_twins)[0].failures
    assert any(right == verified > 1 for verified, right in seen)
    assert any(0 < right < verified for verified, right in seen)
    assert any(right == 0 < verified for verified, right in seen)


def scenario_of(num_requests):
    """So many requests at once for one executor, whose step takes twice as long with seven more tokens; no faults."""
    drawn = draw_scenario(0)
    limits = replace(
        drawn.config.limits,
        num_rows=NUM_BUSY,
        num_blocks=16 * NUM_BUSY,
        max_num_batched_tokens=256,
        max_num_draft_tokens=MAX_DRAFTS,
    )
    request = replace(
        drawn.requests[0],
        at_s=0.5,
        client=0,
        prompt=(65, 66, 67, 68),
        max_tokens=50,
        num_completions=1,
        timeout_s=None,
        leaves_after=None,
        logprobs=None,
        prompt_logprobs=None,
        stop="",
        rules=PlannedRules(),
    )
    return replace(
        drawn,
        num_clients=1,
        scheduler_protocols=drawn.scheduler_protocols[:1],
        executor_protocols=drawn.executor_protocols[:1],
        config=replace(
            drawn.config,
            limits=limits,
            rule=replace(drawn.config.rule, end_probability=0.0),
            base_step_ns=2_000_000,
            is_ahead=False,
            fails_late=False,
            num_doubling=8,
        ),
        reproducibility=Reproducibility.SAME_TOKENS,
        requests=tuple(replace(request, request_id=f"request-{number}", seed=number) for number in range(num_requests)),
        faults=(),
        max_kv_share=None,
    )


def drafts_of(num_requests, monkeypatch):
    """Drafts per row of the second half of the steps in which all of them decode."""
    launches, drafts = PlanAudit.launches, []

    def look_and_launch(audit, plan, table):
        if plan.rows.size == num_requests and (plan.num_scheduled_tokens <= 1 + MAX_DRAFTS).all():
            drafts.append(plan.num_draft_tokens.sum() / num_requests)
        launches(audit, plan, table)

    monkeypatch.setattr(PlanAudit, "launches", look_and_launch)
    trace = Trace(is_kept_whole=False)
    outcome = run_world(World(scenario_of(num_requests), trace), trace)
    assert not outcome.failures, trace.story()
    assert len(outcome.ends) == num_requests
    learnt = drafts[len(drafts) // 2 :]
    return sum(learnt) / len(learnt)


def test_a_lone_request_has_drafts_and_a_busy_executor_has_none(monkeypatch):
    """Half of all single drafts are right: what one costs is an eighth of a lone row's step, and of all rows' time."""
    assert drafts_of(1, monkeypatch) >= 1
    assert drafts_of(NUM_BUSY, monkeypatch) <= 0.05
