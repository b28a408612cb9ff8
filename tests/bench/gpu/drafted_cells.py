"""Steps that verify drafts, by the engine alone: what they cost, and what drafts bring that are right at a given rate.

The model's last norm is zero, so that every logit is, and the same token is always drawn: a draft is right or wrong as
the script says. All weights are read and multiplied all the same.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch

from gpu import cells
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Step, idle_percent, times_ms
from gpu.report import Figure
from paceline_executor.limits import RowLimits
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.device.device import Captured
from paceline_executor.runner.device.drafts import Drafting, MakeDrafting, WantedDrafts
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.interface import Int32Array
from paceline_kernels.sampling import RuleTable
from paceline_kernels.step_inputs import PlanColumns

_WARM_STEPS = 8
_STEP_OF_COST = 0.8  # the acceptance at which a step's time is told


class ScriptedDrafter:
    """See `paceline_executor.runner.device.drafts.DeviceDrafter`: drafts are what is written at their places."""

    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        shape = (limits.num_rows, limits.max_model_len)
        self.script = torch.zeros(shape, dtype=torch.int32, device=device)
        self._depths = torch.arange(limits.max_num_draft_tokens, device=device)

    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        """Of all rows together; nothing is looked at from the host."""
        state, known = rows.state, rows.draws.num_known
        num_rows, max_len = self.script.shape
        # Padding plans for a row behind the last one.
        planned = torch.where(plan.rows < 0, num_rows, plan.rows).long()
        wanted = torch.zeros(num_rows + 1, dtype=torch.int32, device=known.device)
        wanted = wanted.scatter(0, planned, plan.num_tokens)[:num_rows] - (known - state.num_computed)
        wanted = torch.where(state.finish == 0, wanted, 0).clamp(0, len(self._depths))
        places = (known[:, None] + self._depths).clamp(max=max_len - 1).long()  # [num_rows, drafts]
        is_draft = self._depths < wanted[:, None]
        drafts = torch.where(is_draft, self.script.gather(1, places), state.token_ids.gather(1, places))
        state.token_ids.scatter_(1, places, drafts)
        state.num_held.copy_(known + wanted)


class OverwrittenDrafting:
    """See `paceline_executor.runner.device.drafts.Drafting`: `script` replaces what `inner` drafts."""

    def __init__(self, inner: Drafting, script: Drafting) -> None:
        self.max_drafts, self.block_tensors, self.observer = inner.max_drafts, inner.block_tensors, inner.observer
        self._both = (inner, script)

    def tell(self, rows: Int32Array) -> None:
        for drafting in self._both:
            drafting.tell(rows)

    def capture(self, plan: Captured[PlanColumns], num_rows: int) -> None:
        for drafting in self._both:
            drafting.capture(plan, num_rows)

    def launch(self, plan: Captured[PlanColumns], num_rows: int, wanted: WantedDrafts, rules: RuleTable | None) -> None:
        for drafting in self._both:
            drafting.launch(plan, num_rows, wanted, rules)


def overwriting(inner: MakeDrafting, script: MakeDrafting) -> MakeDrafting:
    """Both are made for the same rows."""
    return lambda device, rows: OverwrittenDrafting(inner(device, rows), script(device, rows))


def tell_nothing_apart(model: LlamaModel) -> None:
    """All logits are zero from now on."""
    model._final_norm.zero_()  # noqa: SLF001  no model is served like this


@dataclass(slots=True)
class DraftedCells:
    """Measures one engine, whose drafts are the script's."""

    numbers: str
    feed: Feed
    script: ScriptedDrafter
    shapes: cells.Shapes
    plain_ms: dict[int, float]  # steps without drafts, by rows, of an engine whose steps do nothing for drafts
    drafter: str = ""  # whose work is done before
    _random: Random = field(default_factory=lambda: Random(0))  # noqa: S311  repeatable, not secret
    _speedups: dict[float, dict[int, list[float]]] = field(default_factory=dict)  # by acceptance, then by rows
    _drawn: int = 0

    def measure(self, num_rows: int, num_drafts: int) -> list[Figure]:
        """Its time in plain steps; how many times as many tokens come at each acceptance, and of what should come."""
        plain_ms = statistics.median(times_ms(self._steps(num_rows, 0)))  # it says what is drawn, too
        return list(self._figures(num_rows, num_drafts, self.plain_ms.setdefault(num_rows, plain_ms)))

    def _figures(self, num_rows: int, num_drafts: int, plain_ms: float) -> Iterator[Figure]:
        shape = cells.drafts_at(num_rows, num_drafts, self.drafter)
        for acceptance in cells.ACCEPTANCES:
            rounds = []
            for _ in range(self.shapes.num_drafted_rounds):
                self._write(acceptance)
                rounds.append(self._steps(num_rows, num_drafts))
            times = times_ms(*rounds)
            step_ms = statistics.median(times)
            num_tokens = sum(step.num_output for steps in rounds for step in steps[1:])
            speedup = num_tokens / sum(times) / (num_rows / plain_ms)
            expected = sum(acceptance**depth for depth in range(num_drafts + 1))
            if acceptance == _STEP_OF_COST:
                yield Figure(self.numbers, cells.VERIFY, shape, "ms", engine=step_ms)
                yield Figure(self.numbers, cells.VERIFY_COST, shape, "x", engine=step_ms / plain_ms)
                yield Figure(self.numbers, cells.IDLE, shape, "%", engine=idle_percent(*rounds))
            self._speedups.setdefault(acceptance, {}).setdefault(num_rows, []).append(speedup)
            yield Figure(self.numbers, cells.SPEEDUP.format(acceptance), shape, "x", engine=speedup)
            share = speedup / (expected / (step_ms / plain_ms))
            yield Figure(self.numbers, cells.SPEEDUP_SHARE.format(acceptance), shape, "x", engine=share)

    def best(self) -> list[Figure]:
        return [
            Figure(
                self.numbers,
                cells.BEST_SPEEDUP.format(acceptance),
                cells.drafting_rows(rows, self.drafter),
                "x",
                engine=max(found),
            )
            for acceptance, of_rows in self._speedups.items()
            for rows, found in of_rows.items()
        ]

    def _steps(self, num_rows: int, num_drafts: int) -> list[Step]:
        """Those in which all rows ran, without the first ones."""
        context, num_steps = self.shapes.drafted_context, self.shapes.num_steps + _WARM_STEPS
        num_tokens = (num_steps + 4) * (1 + num_drafts)
        prompts = [[self._random.randrange(3, 200) for _ in range(context)] for _ in range(num_rows)]
        streams = [
            self.feed.add(prompt, num_tokens, num_cached=context - 1, num_drafts=num_drafts) for prompt in prompts
        ]
        steps: list[Step] = []
        self.feed.run(steps.append, until=lambda: len(steps) >= num_steps)
        self.feed.end(streams)
        drawn = {token for stream in streams for token in stream.output}
        if len(drawn) > 1:
            raise CheckFailedError(f"tokens {sorted(drawn)[:3]} were drawn, where all logits are the same")
        self._drawn = drawn.pop()
        return [step for step in steps if step.num_rows == num_rows][_WARM_STEPS:]

    def _write(self, acceptance: float) -> None:
        script = self.script.script
        is_right = torch.rand(script.shape, device=script.device) < acceptance
        script.copy_(torch.where(is_right, self._drawn, self._drawn + 1))
