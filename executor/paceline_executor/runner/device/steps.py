"""Steps on a device: what they launch, captured for every bucket, or launched one by one where none fits.

A step is two captures: `forward` up to the hidden states that tokens are drawn after, and `draw`, so that what the host
decides in between (rules, masks of forms) needs no capture of its own. Where there may be drafts, the plan is
read by one before them, and drafting, which is launched if a row may have any, lies between. Steps begin and end in
memory that host and device share: nothing is copied, and nothing is waited for. Refuses to know plans and results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch

from paceline_executor.models.interface import DeviceModel, ForwardInputs, KvCache
from paceline_executor.runner.device.buckets import Bucket, Buckets
from paceline_executor.runner.device.device import Capture, Captured, Device, Uncaptured, capture_filled
from paceline_executor.runner.device.drafts import Drafting, WantedDrafts
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.device.told_drafts import ToldDrafts
from paceline_kernels.attention import Splits
from paceline_kernels.clock import new_clock, stamp
from paceline_kernels.draws import DrawInputs, advance_rows, draw_inputs
from paceline_kernels.plan_ring import PlanRing, read_plan
from paceline_kernels.result_ring import ResultRing, write_results
from paceline_kernels.sampling import DrawRules, RuleTable, SamplingParameters, TokenMasks, sample
from paceline_kernels.step_inputs import PlanColumns, StepInputs, step_inputs

T = TypeVar("T")

_FORWARD_ENDED, _DRAFTS_ENDED = 1, 2  # places of the clock


@dataclass(frozen=True, slots=True)
class Rings:
    """Host and device share them."""

    plans: PlanRing
    results: ResultRing
    max_logprobs: int  # alternatives that a result has room for


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The draws behind it need this."""

    plan: PlanColumns
    batch: StepInputs
    draws: DrawInputs
    hidden: torch.Tensor  # [num_draws, hidden]


@dataclass(frozen=True, slots=True)
class RowMasks:
    """As `runner.interface.StepMasks` has them, on the device."""

    words: torch.Tensor  # [num_masks, words] int32
    before_output: torch.Tensor  # [num_rows + 1] int32, the last of draws of no row

    def of(self, draws: DrawInputs) -> TokenMasks:
        return TokenMasks(self.words, self.before_output[draws.rows] + draws.parameters.offsets)


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """`draws` are keyed by whether they have log-probabilities."""

    plan: Captured[PlanColumns] | None  # None: `forward` reads it
    forward: Captured[Forwarded]
    draws: dict[bool, Captured[None]]


def unpadded(batch: StepInputs, draws: DrawInputs) -> tuple[StepInputs, DrawInputs]:
    """For a device that may look at how many there are."""
    num_tokens, num_draws = int(batch.cu_seqlens[-1]), int(draws.cu_draws[-1])
    if num_tokens < batch.token_ids.shape[0]:
        names = ("token_ids", "positions", "slot_mapping")
        batch = replace(batch, **{name: getattr(batch, name)[:num_tokens] for name in names})
    if num_draws < draws.places.shape[0]:
        given = draws.parameters
        parameters = SamplingParameters(*(getattr(given, column.name)[:num_draws] for column in fields(given)))
        draws = replace(draws, places=draws.places[:num_draws], rows=draws.rows[:num_draws], parameters=parameters)
    return batch, draws


class DeviceSteps:
    """One model on one device: its KV cache, its rows, and its captured steps."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        kv_cache: KvCache,
        rows: RowWords,
        rings: Rings,
        block_size: int,
        splits: Splits,
        drafting: Drafting,
    ) -> None:
        self._device = device
        self._model = model
        self._kv_cache = kv_cache
        self._rows = rows
        self._rings = rings
        self._block_size = block_size
        self._splits = splits
        self.drafting = drafting
        self.told = ToldDrafts(device, rows, drafting.max_drafts)
        self._step = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        self._clock = new_clock(device.torch_device)
        self._graphs: dict[Bucket, StepGraphs] = {}

    @property
    def num_steps(self) -> int:
        """Counts captures, too. Waits for the steps."""
        self._device.synchronize()
        return int(self._step.item())

    def capture(self, buckets: Buckets) -> Iterator[Bucket]:
        """Largest first; yields each before it is captured. No row may be planned."""
        plans: dict[int, Captured[PlanColumns]] = {}
        for bucket in buckets:
            yield bucket
            num_rows = bucket.num_rows
            if not bucket.is_decode and num_rows not in plans:
                plans[num_rows] = capture_filled(self._device, partial(self._read_plan, num_rows))
                self.drafting.capture(plans[num_rows], num_rows)
            plan = None if bucket.is_decode else plans[num_rows]
            forward = capture_filled(self._device, self._forwarding(bucket, plan))
            self._graphs[bucket] = self._with_draws(plan, forward, self._device.capture)

    def launch(
        self,
        size: Bucket,
        rules: RuleTable | None,
        wanted: WantedDrafts | None = None,
        tell: Callable[[torch.Tensor], None] | None = None,
    ) -> StepGraphs:
        """Up to the draws. Its plan is in the ring. size: one that was captured, or any other. rules: None where no
        drawing row has any. wanted: None where no row may have a draft. tell: is called behind
        the drafting, with the step's number.
        """
        graphs, span = self._graphs.get(size) or self._uncaptured(size), self._device.profiler.span
        if graphs.plan is not None:
            graphs.plan.replay()
            if wanted is not None:
                with span("draft"), self._device.guessing():
                    self.drafting.launch(graphs.plan, size.num_rows, wanted, rules)
                self._device.launch(lambda: stamp(self._clock, _DRAFTS_ENDED))
                if tell is not None:
                    tell(self._step)
        with span("forward"):
            graphs.forward.replay()
        return graphs

    def draw(
        self, graphs: StepGraphs, *, with_logprobs: bool, rules: RuleTable | None, masks: RowMasks | None = None
    ) -> None:
        """Behind the step launched last. masks: on the device, of rows."""
        with self._device.profiler.span("draw"):
            if rules is None and masks is None:
                graphs.draws[with_logprobs].replay()
            else:
                drawing = partial(self._draw, with_logprobs=with_logprobs, rules=rules, masks=masks)
                self._device.launch(lambda: drawing(graphs.forward.outputs))

    def count_from(self, step: int) -> None:
        """The next step has this number."""
        self._device.launch(lambda: self._step.fill_(step))

    def logits_of(self, plan: PlanColumns, num_tokens: int) -> torch.Tensor:
        """Computes the planned row's next tokens; returns the logits after each. To be launched."""
        batch = step_inputs(self._rows.state, plan, num_tokens, self._block_size)
        places = torch.arange(num_tokens, dtype=torch.int32, device=self._device.torch_device)
        inputs = self._inputs(batch, places, None)
        return self._model.logits(self._hidden(inputs), self._splits)

    def _uncaptured(self, size: Bucket) -> StepGraphs:
        def launched(work: Callable[[], T]) -> Uncaptured[T]:
            return Uncaptured(self._device, work)

        plan = None if size.is_decode else launched(lambda: self._read_plan(size.num_rows))
        return self._with_draws(plan, launched(self._forwarding(size, plan)), launched)

    def _forwarding(self, size: Bucket, plan: Captured[PlanColumns] | None) -> Callable[[], Forwarded]:
        return lambda: self._forward(size, self._read_plan(size.num_rows) if plan is None else plan.outputs)

    def _with_draws(
        self, plan: Captured[PlanColumns] | None, forward: Captured[Forwarded], captured: Capture
    ) -> StepGraphs:
        def drawing(*, with_logprobs: bool) -> Captured[None]:
            return captured(lambda: self._draw(forward.outputs, with_logprobs=with_logprobs, rules=None, masks=None))

        return StepGraphs(plan, forward, {False: drawing(with_logprobs=False), True: drawing(with_logprobs=True)})

    def _read_plan(self, num_rows: int) -> PlanColumns:
        return read_plan(self._rings.plans, self._step, self._rows.words, num_rows, self._clock)

    def _forward(self, size: Bucket, plan: PlanColumns) -> Forwarded:
        rows = self._rows
        batch = step_inputs(rows.state, plan, size.num_tokens, self._block_size)
        draws = draw_inputs(rows.state, rows.draws, plan, batch, size.num_draws, self.drafting.max_drafts)
        if self._device.is_eager:
            batch, draws = unpadded(batch, draws)
        inputs = self._inputs(batch, draws.places, size.max_query_len)
        hidden = self._hidden(inputs)
        stamp(self._clock, _FORWARD_ENDED)
        return Forwarded(plan, batch, draws, hidden)

    def _hidden(self, inputs: ForwardInputs) -> torch.Tensor:
        observer = self.drafting.observer
        if observer is None or not inputs.token_ids.shape[0]:
            return self._model.hidden(inputs, self._kv_cache)
        states = observer.states(inputs.token_ids.shape[0])
        hidden = self._model.hidden(inputs, self._kv_cache, states)
        observer.observe(states, inputs.slot_mapping)
        return hidden

    def _draw(
        self, forwarded: Forwarded, *, with_logprobs: bool, rules: RuleTable | None, masks: RowMasks | None
    ) -> None:
        rows, draws = self._rows, forwarded.draws
        logits = self._model.logits(forwarded.hidden, self._splits)
        drawn = None if rules is None else DrawRules(rules, draws.rows, rows.state.token_ids, rows.draws.num_prompt)
        unmasked = None if masks is None else masks.of(draws)
        max_logprobs = self._rings.max_logprobs if with_logprobs else -1
        vocabulary = self._model.vocabulary
        samples = sample(logits, draws.parameters, drawn, unmasked, max_logprobs=max_logprobs, vocabulary=vocabulary)
        columns = rows.state, rows.draws, forwarded.plan, forwarded.batch, draws, samples
        advanced = advance_rows(*columns, self.drafting.max_drafts)
        results, step, clock = self._rings.results, self._step, self._clock
        write_results(results, step, advanced, draws, samples, clock, with_logprobs=with_logprobs)

    def _inputs(self, batch: StepInputs, places: torch.Tensor, max_query_len: int | None) -> ForwardInputs:
        return ForwardInputs(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            cu_seqlens=batch.cu_seqlens,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_tokens=places,
            splits=self._splits,
            short_tokens=max_query_len or 1,
            max_query_len=max_query_len,
        )
