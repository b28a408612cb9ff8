"""The simulated executor generates what the reference generates, whatever valid plans drive it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.values import BatchPlan, BlockGrants, Release, RowFinish
from paceline_scheduler.core.request import Request
from paceline_scheduler.simulator.executor import SimulatedExecutor
from paceline_scheduler.simulator.tokens import TokenRule, reference_output
from paceline_scheduler.testing.requests import column, expected_output, make_executor, make_placement, make_request

BLOCK_SIZE = 4


class RandomPlanner:
    """Plans at random inside the rules: one request per row, chunks of any length, preemption at any time."""

    def __init__(self, executor: SimulatedExecutor, requests: list[Request], draw) -> None:
        self.executor = executor
        self.draw = draw
        self.description, _ = executor.attach("x")
        self.step_id = 0
        self.requests = dict(enumerate(requests))
        self.outputs: dict[int, list[int]] = {row: [] for row in self.requests}
        self.attempts = dict.fromkeys(self.requests, 0)
        self.computed: dict[int, int] = {}  # of placed rows
        self.tables: dict[int, list[int]] = {}
        self.free = list(range(executor.config.num_blocks))

    def step(self) -> None:
        """Plan and run one step."""
        releases, placements, grants, rows, counts = [], [], [], [], []
        for row, request in self.requests.items():
            if row in self.tables and self.draw(st.integers(0, 9)) == 0:
                releases.append(Release(row, None))
                self.free += self.tables.pop(row)
            elif row not in self.tables:
                placements.append(self._place(row, request))
            if row in self.tables and self.draw(st.booleans()):
                rows.append(row)
                counts.append(self._schedule(row, request, grants))
        self.step_id += 1
        triples = np.array(grants, dtype=np.int32).reshape(-1, 3)
        plan = BatchPlan(
            self.description.incarnation,
            self.description.epoch,
            self.step_id,
            column(*rows),
            column(*counts),
            0,
            releases=tuple(releases),
            new_requests=tuple(placements),
            grants=BlockGrants(triples[:, 0], triples[:, 1], triples[:, 2]),
        )
        self._take(self.executor.execute(plan))

    def _place(self, row, request):
        self.tables[row], self.computed[row] = [], 0
        self.attempts[row] += 1
        return make_placement(row, request, self.attempts[row], self.outputs[row])

    def _schedule(self, row, request, grants):
        known = len(request.prompt_token_ids) + len(self.outputs[row])
        count = self.draw(st.integers(1, known - self.computed[row]))
        self.computed[row] += count
        while len(self.tables[row]) * BLOCK_SIZE < self.computed[row]:
            block = self.free.pop(self.draw(st.integers(0, len(self.free) - 1)))
            grants.append((row, len(self.tables[row]), block))
            self.tables[row].append(block)
        return count

    def _take(self, result):
        tokens = iter(result.token_ids.tolist())
        for row, accepted, finish in zip(result.rows.tolist(), result.num_accepted, result.finishes, strict=True):
            self.outputs[row] += [next(tokens) for _ in range(accepted)]
            if finish == RowFinish.LENGTH:
                del self.requests[row]


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(st.data())
def test_any_valid_plans_generate_the_reference_output(data):
    """Chunks, batch mates, blocks and preemptions leave no trace in the tokens."""
    requests = [make_request(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))) for _ in range(3)]
    planner = RandomPlanner(make_executor(block_size=BLOCK_SIZE), requests, data.draw)
    for _ in range(400):
        if not planner.requests:
            break
        planner.step()
    for row, request in enumerate(requests):
        if row not in planner.requests:
            assert tuple(planner.outputs[row]) == expected_output(request)


@pytest.mark.parametrize("change", ["lost", "doubled", "swapped", "other"])
def test_a_token_that_is_wrong_anywhere_changes_what_follows(change):
    """The hash depends on every token and on its place."""
    right = [5, 6, 7, 8]
    wrong = {"lost": [5, 6, 8], "doubled": [5, 6, 6, 7, 8], "swapped": [6, 5, 7, 8], "other": [5, 6, 9, 8]}[change]
    rule = TokenRule()
    assert reference_output(right, 1, 3, rule) != reference_output(wrong, 1, 3, rule)


def test_end_tokens_come_about_as_often_as_asked():
    """An end token is drawn with the configured probability and never otherwise."""
    rule = TokenRule(vocab_size=50, end_probability=0.1)
    lengths = [len(reference_output([1, 2], seed, 40, rule, (7,))) for seed in range(200)]
    assert 7 < sum(lengths) / 200 < 12.5
    assert len(reference_output([1, 2], 3, 40, TokenRule(vocab_size=50), (7,))) == 40
