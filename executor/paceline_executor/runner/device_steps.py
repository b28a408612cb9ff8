"""Steps on a device: what they launch, captured for every bucket, or launched one by one where none fits.

A step is two captures: `forward` up to the hidden states that tokens are drawn after, and `draw`, so that what the host
decides in between (rules, later masks of grammars) needs no capture of its own. Both begin and end in memory that host
and device share: nothing is copied, and nothing is waited for. Refuses to know plans and results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline_executor.models.interface import DeviceModel, ForwardInputs, KvCache
from paceline_executor.runner.buckets import Bucket, Buckets
from paceline_executor.runner.device import Captured, Device
from paceline_executor.runner.row_words import RowWords
from paceline_kernels.attention import Splits
from paceline_kernels.clock import new_clock, stamp
from paceline_kernels.draws import DrawInputs, advance_rows, draw_inputs
from paceline_kernels.plan_ring import PlanRing, read_plan
from paceline_kernels.result_ring import ResultRing, write_results
from paceline_kernels.sampling import DrawRules, RowRules, sample
from paceline_kernels.step_inputs import PlanColumns, StepInputs, step_inputs

_FORWARD_ENDED = 1  # a place of the clock


class DeviceDrafter(Protocol):
    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        """Puts drafts behind known tokens and counts them as held: at most as many as more tokens are planned."""
        ...


class NoDrafter:
    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        """See DeviceDrafter."""


@dataclass(frozen=True, slots=True)
class Drafting:
    drafter: DeviceDrafter = field(default_factory=NoDrafter)
    max_drafts: int = 0  # of a row


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
class _Graphs:
    """`draws` are keyed by whether they have log-probabilities."""

    forward: Captured[Forwarded]
    draws: dict[bool, Captured[None]]


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
        self._drafting = drafting
        self._step = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        self._clock = new_clock(device.torch_device)
        self._graphs: dict[Bucket, _Graphs] = {}

    @property
    def num_steps(self) -> int:
        """Counts captures, too. Waits for the steps."""
        self._device.synchronize()
        return int(self._step.item())

    def capture(self, buckets: Buckets) -> Iterator[Bucket]:
        """Largest first; yields each before it is captured. No row may be planned."""
        for bucket in buckets:
            yield bucket
            forward = self._device.capture(self._forwarding(bucket))
            # A capture computes nothing: the run before a draw's would take whatever lies there for rows and places.
            forward.replay()
            draws = {
                with_logprobs: self._device.capture(self._drawing(forward, with_logprobs=with_logprobs))
                for with_logprobs in (False, True)
            }
            self._graphs[bucket] = _Graphs(forward, draws)

    def launch(self, size: Bucket, *, with_logprobs: bool, rules: RowRules | None) -> None:
        """Its plan is in the ring. size: one that was captured, or any other."""
        graphs, span = self._graphs.get(size), self._device.profiler.span
        if graphs is None:
            with span("forward and draw"):
                self._device.launch(lambda: self._draw(self._forward(size), with_logprobs=with_logprobs, rules=rules))
            return
        with span("forward"):
            graphs.forward.replay()
        with span("draw"):
            if rules is None:
                graphs.draws[with_logprobs].replay()
            else:
                forwarded = graphs.forward.outputs
                self._device.launch(lambda: self._draw(forwarded, with_logprobs=with_logprobs, rules=rules))

    def logits_of(self, plan: PlanColumns, num_tokens: int) -> torch.Tensor:
        """Computes the planned row's next tokens; returns the logits after each. To be launched."""
        batch = step_inputs(self._rows.state, plan, num_tokens, self._block_size)
        places = torch.arange(num_tokens, dtype=torch.int32, device=self._device.torch_device)
        inputs = self._inputs(batch, places, None)
        return self._model.logits(self._model.hidden(inputs, self._kv_cache), self._splits)

    def _forwarding(self, bucket: Bucket) -> Callable[[], Forwarded]:
        return lambda: self._forward(bucket)

    def _drawing(self, forward: Captured[Forwarded], *, with_logprobs: bool) -> Callable[[], None]:
        return lambda: self._draw(forward.outputs, with_logprobs=with_logprobs, rules=None)

    def _forward(self, size: Bucket) -> Forwarded:
        rows = self._rows
        plan = read_plan(self._rings.plans, self._step, rows.words, size.num_rows, self._clock)
        if not size.is_decode:
            self._drafting.drafter.draft(rows, plan)
        batch = step_inputs(rows.state, plan, size.num_tokens, self._block_size)
        draws = draw_inputs(rows.state, rows.draws, plan, batch, size.num_draws, self._drafting.max_drafts)
        inputs = self._inputs(batch, draws.places, size.max_query_len)
        hidden = self._model.hidden(inputs, self._kv_cache)
        stamp(self._clock, _FORWARD_ENDED)
        return Forwarded(plan, batch, draws, hidden)

    def _draw(self, forwarded: Forwarded, *, with_logprobs: bool, rules: RowRules | None) -> None:
        rows, draws = self._rows, forwarded.draws
        logits = self._model.logits(forwarded.hidden, self._splits)
        drawn = None if rules is None else DrawRules(rules, draws.rows, rows.state.token_ids, rows.draws.num_prompt)
        max_logprobs = self._rings.max_logprobs if with_logprobs else -1
        samples = sample(logits, draws.parameters, drawn, max_logprobs=max_logprobs)
        columns = rows.state, rows.draws, forwarded.plan, forwarded.batch, draws, samples
        advanced = advance_rows(*columns, self._drafting.max_drafts)
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
