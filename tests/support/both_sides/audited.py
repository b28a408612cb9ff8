"""Executors for tests of schedulers: every plan is audited, drafts are verified, and steps and rows fail where wanted.

Defaults are small, so that a test names only what it is about.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from both_sides.executor import InlineExecutor
from executor_rig.hash_runner import HashRule
from paceline.plan.values import (
    BatchPlan,
    GraphSizes,
    Int32Array,
    RecordId,
    StepPoint,
    StepResult,
    TokenLogprobs,
)
from paceline_executor.errors import StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import Launched
from paceline_executor.runner.interface import RowProblem, StepOutput
from paceline_executor.runner.simulated import logprobs_of
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_executor.start.loading import describe_simulated
from paceline_executor.start.opening import simulated_tokenizer
from paceline_scheduler.core.request import Request
from simulation.audit import AuditedTable, PlanAudit
from simulation.device import InjectedError, SlotRunner, TimedRunner
from simulation.drafting import HashDrafter, keys_in

VOCAB_SIZE = 32_000
_STEP_POINTS = (StepPoint(1, 1_000_000), StepPoint(64, 4_000_000))
PLAIN = HashRule(VOCAB_SIZE)

Acceptance = Callable[[int], int]
"""How many tokens a row gets that has so many drafts: from one to one more than them."""


def ending(probability: float) -> HashRule:
    """Return the rule by which token 0 ends outputs, with this probability at each token."""
    return HashRule(VOCAB_SIZE, (0,), probability) if probability else PLAIN


def drawn_acceptance(seed: int) -> Acceptance:
    random = Random(seed)  # noqa: S311 - nothing secret
    return lambda num_drafts: random.randint(1, num_drafts + 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an executor is: the model that it serves and how it draws, its bounds and its speed."""

    limits: RowLimits
    model: str
    rule: HashRule
    acceptance: Acceptance
    step_times: StepTimeCurve
    graphs: GraphSizes | None = None
    weights_digest: str = ""


class AuditedRows(AuditedTable):
    """The rows of one process, with its device and an auditor who tells `violations`.

    Steps with requests that are `failing` fail; those among `problems` fail alone, once.
    """

    def __init__(
        self,
        kind: Kind,
        failing: Set[RecordId],
        problems: dict[RecordId, RowProblem],
        violations: list[str],
        step_ns: Callable[[int], int] = lambda _: 0,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        limits = kind.limits
        slots = SlotRunner(limits.num_blocks, limits.block_size, kind.rule, violations.append, kind.step_times)
        slots.draft_by(HashDrafter(kind.rule, lambda most: kind.acceptance(most) - 1, keys_in(slots)))
        self.device = TimedRunner(slots, step_ns, clock_ns)
        self.audit = PlanAudit(limits, lambda _, sentence: violations.append(sentence))
        super().__init__(limits, self.audit, slots, self.device, lambda _: None, failing)
        self.num_landed = 0
        self._problems = problems
        description = describe_simulated(kind.model, slots, limits, simulated_tokenizer())
        description = replace(description, graphs=kind.graphs, weights_digest=kind.weights_digest)
        self.loaded = Loaded(Engine(self, self.device, clock_ns), description)

    def launch(self, plan: BatchPlan, now_ns: int) -> Launched:
        launched = super().launch(plan, now_ns)
        if self._problems and not self.device.fails_next:
            placements = map(self.placement_on, launched.prepared.rows.tolist())
            self.slots.problems = {
                index: self._problems.pop(placement.record_id)
                for index, placement in enumerate(placements)
                if placement is not None and placement.record_id in self._problems
            }
        return launched

    def land(self, launched: Launched, output: StepOutput) -> StepResult:
        self.num_landed += 1
        return super().land(launched, output)


class AuditedExecutor(InlineExecutor):
    """An executor whose scheduler breaks no rule: whatever breaks one is an AssertionError.

    Steps with requests that are `failing` fail.
    """

    def __init__(self, kind: Kind, incarnation: int, max_plans_in_flight: int) -> None:
        self.kind = kind
        self.failing: set[RecordId] = set()
        self._problems: dict[RecordId, RowProblem] = {}
        self._violations: list[str] = []
        super().__init__(self._loaded, incarnation, max_plans_in_flight)

    def fail_row(self, key: RecordId, problem: RowProblem) -> None:
        """Let a request fail alone the next time it runs."""
        self._problems[key] = problem

    def receive(self, plan: BatchPlan) -> None:
        """Take a plan in, checking everything that must hold when it arrives."""
        super().receive(plan)
        self._rows.audit.arrives(self._waiting[-1], self._rows)
        self._check()

    def run_next(self) -> StepResult:
        try:
            result = super().run_next()
        except StepFailedError as error:
            if not isinstance(error.__cause__, InjectedError):
                raise AssertionError("a step failed that should not") from error
            raise
        finally:
            self._check()
        return result

    def restart(self) -> None:
        self._problems.clear()
        super().restart()

    def _check(self) -> None:
        assert not self._violations, f"rules of the plan protocol are broken: {self._violations}"

    def _loaded(self) -> Loaded:
        self._rows = AuditedRows(self.kind, self.failing, self._problems, self._violations)
        return self._rows.loaded


def make_executor(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_rows: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    max_plans_in_flight: int = 4,
    max_num_drafts: int = 0,
    model: str = "simulated",
    end_probability: float = 0.0,
    incarnation: int = 1,
    acceptance: Acceptance | None = None,
    step_points: Sequence[StepPoint] = _STEP_POINTS,
    graphs: GraphSizes | None = None,
) -> AuditedExecutor:
    """Return an executor; its `attach` gives what `Core.attach` takes."""
    limits = RowLimits(
        num_rows=max_num_rows,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        max_num_draft_tokens=max_num_drafts,
    )
    step_times = StepTimeCurve(tuple((point.num_tokens, float(point.duration_ns)) for point in step_points))
    kind = Kind(limits, model, ending(end_probability), acceptance or drawn_acceptance(0), step_times, graphs)
    return AuditedExecutor(kind, incarnation, max_plans_in_flight)


def expected_output(request: Request, rule: HashRule = PLAIN) -> tuple[int, ...]:
    """Return what a request whose `max_tokens` is set generates, computed without rows and blocks."""
    assert request.max_tokens is not None, "without max_tokens the output depends on context and pool"
    prompt, seed = tuple(request.prompt_token_ids.tolist()), request.sampling.seed
    return _output(rule, prompt, request.max_tokens, seed, request.end_token_ids, request.min_tokens)


@lru_cache(maxsize=4096)
def _output(
    rule: HashRule, prompt: tuple[int, ...], max_tokens: int, seed: int, end_token_ids: tuple[int, ...], min_tokens: int
) -> tuple[int, ...]:
    return tuple(rule.output(prompt, max_tokens, seed, end_token_ids, min_tokens))


def expected_logprobs(token_ids: Int32Array | tuple[int, ...], num_top: int) -> list[TokenLogprobs]:
    """Return what is said of tokens, drawn or of a prompt."""
    told = logprobs_of(token_ids, num_top)
    columns = zip(told.logprobs.tolist(), told.top_token_ids.tolist(), told.top_logprobs.tolist(), strict=True)
    return [
        TokenLogprobs(int(token_id), logprob, tuple(zip(top_ids, top, strict=True)))
        for token_id, (logprob, top_ids, top) in zip(token_ids, columns, strict=True)
    ]
