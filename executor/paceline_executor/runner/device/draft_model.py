"""Drafts of a smaller model on the device: a pass over what it has not computed of each row, then a pass per draft.

It reads and writes the same rows as the target, and draws by the same kernels with the same noise. How many tokens it
has computed is a column of its own: drafts are never among them, so nothing is taken back. Refuses to know plans, and
how drafts are verified.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch

from paceline_executor.limits import MAX_VERIFIED_TOKENS, RowLimits
from paceline_executor.models.interface import DeviceModel, ForwardInputs, KvCache
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.device import Capture, Captured, Device, Uncaptured, capture_filled
from paceline_executor.runner.device.drafts import MakeDrafting, StatesObserver, WantedDrafts
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.device.steps import unpadded
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_kernels.attention import Splits
from paceline_kernels.draws import DrawInputs, FinishCode, advance_rows, draw_inputs
from paceline_kernels.sampling import DrawRules, RuleTable, sample
from paceline_kernels.step_inputs import PlanColumns, StepInputs, step_inputs

T = TypeVar("T")

NUM_PASSES = 3  # captured of each number of rows
_CATCH_UP = 1024  # tokens of a step: prompts, or what steps without drafts have left
_LEAST_CATCH_UP = 16
_FIRST_TOKEN_NS = 1e6
_GAIN = 1 / 4
_FAR_BEHIND = 2  # times what a row is behind after a step of drafts: less is caught up in passing


def most_tokens(max_num_batched_tokens: int) -> int:
    """Of a pass."""
    return max(MAX_VERIFIED_TOKENS, min(_CATCH_UP, max_num_batched_tokens))


def drafting_by_model(
    model: DeviceModel,
    config: ModelConfig,
    numerics: Numerics,
    limits: RowLimits,
    max_model_len: int,
    splits: Splits,
    device: torch.device,
) -> MakeDrafting:
    """Allocates its KV cache."""
    geometry = kv_geometry(config, limits.num_blocks, limits.block_size, numerics)
    kv_cache = allocate_on_device(geometry, numerics.kv, device)
    parts = DraftModelParts(model, kv_cache, config.vocab_size, max_model_len)
    return partial(DeviceDraftModel, parts, limits, splits)


class DraftingModel(Protocol):
    """What drafts are computed with."""

    @property
    def shift(self) -> int:
        """How many tokens its rows are behind the target's: 1 if a position takes the token behind it."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """In tokens: longer rows have no drafts."""
        ...

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]: ...

    def hidden(self, inputs: ForwardInputs, rows: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """rows: [num_logits] of the executor, -1 in padding. is_first: not of a step's further drafts."""
        ...

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DraftModelParts:
    """See DraftingModel."""

    model: DeviceModel
    kv_cache: KvCache  # under the target's block ids
    vocab_size: int
    max_model_len: int
    shift: int = 0

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kv_cache.of_blocks

    def hidden(self, inputs: ForwardInputs, rows: torch.Tensor, *, is_first: bool) -> torch.Tensor:  # noqa: ARG002
        return self.model.hidden(inputs, self.kv_cache)

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        return self.model.logits(hidden, splits)


@dataclass(frozen=True, slots=True)
class _Forwarded:
    plan: PlanColumns
    batch: StepInputs
    draws: DrawInputs
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    forward: Captured[_Forwarded]
    draw: Captured[None]
    is_first: bool


@dataclass(frozen=True, slots=True)
class _DraftGraphs:
    near: _Pass  # the first, for rows that drafted in the step before
    far: _Pass  # the first, where any is far behind
    next: _Pass


class _CatchUpTime:
    """What a token that rows lack takes, as measured; for devices that steps wait for meanwhile."""

    def __init__(self) -> None:
        self._token_ns = _FIRST_TOKEN_NS

    def tokens_within(self, spare_ns: int) -> int:
        return max(_LEAST_CATCH_UP, int(spare_ns / self._token_ns)) if spare_ns else 0

    def observe(self, num_tokens: int, took_ns: int) -> None:
        """Few tokens hardly take longer than one: they tell nothing."""
        if num_tokens >= _LEAST_CATCH_UP // 2:
            self._token_ns += _GAIN * (took_ns / num_tokens - self._token_ns)


class DeviceDraftModel:
    """See Drafting. What a row is behind is computed within a step's bound, the least behind first."""

    def __init__(
        self,
        parts: DraftingModel,
        limits: RowLimits,
        splits: Splits,
        device: Device,
        rows: RowWords,
        *,
        observer: StatesObserver | None = None,
    ) -> None:
        self.observer = observer
        num_rows, torch_device = limits.num_rows, device.torch_device
        self.max_drafts = limits.max_num_draft_tokens
        self._parts = parts
        self._limits = limits
        self._splits = splits
        self._device = device
        self._rows = rows
        # Of all rows while drafts are drawn, and of none: for padding.
        self._until, self._finish = (
            torch.zeros(num_rows + 1, dtype=torch.int32, device=torch_device) for _ in range(2)
        )
        self._ones = torch.ones(num_rows, dtype=torch.int32, device=torch_device)
        self._state = replace(
            rows.state,
            token_ids=rows.next_token_ids if parts.shift else rows.state.token_ids,
            num_computed=torch.zeros_like(self._ones),
            finish=self._finish[:num_rows],
        )
        self._draws = replace(
            rows.draws,
            num_prompt=torch.zeros_like(self._ones),
            num_known=torch.zeros_like(self._ones),
            max_known=self._until[:num_rows],
            num_logprobs=-self._ones,
        )
        self._behind = _Behind(num_rows, self._most_near, parts.shift)
        self._catch_up = _CatchUpTime() if device.is_eager else None
        self._graphs: dict[int, _DraftGraphs] = {}

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        return self._parts.block_tensors

    @property
    def _longest(self) -> int:
        """Known tokens and drafts."""
        return min(self._parts.max_model_len + 1, self._limits.max_model_len - 1)

    @property
    def _most_near(self) -> int:
        """What a row is behind at most if it drafted in the step before."""
        return 1 + self.max_drafts

    def tell(self, rows: Int32Array) -> None:
        self._behind.tell(rows)

    def capture(self, plan: Captured[PlanColumns], num_rows: int) -> None:
        self._graphs[num_rows] = self._passes(plan, num_rows, self._far_tokens(num_rows), self._captured)

    def launch(self, plan: Captured[PlanColumns], num_rows: int, wanted: WantedDrafts, rules: RuleTable | None) -> None:
        far = self._far_tokens(num_rows, wanted.spare_ns)
        graphs = self._graphs.get(num_rows) or self._passes(plan, num_rows, far, self._uncaptured)
        if self._behind.is_far(wanted):
            self._launch_pass(graphs.far, rules)
            self._behind.take(wanted, far, None)
        else:
            self._launch_pass(graphs.near, rules)
            self._behind.take(wanted, self._near_tokens(num_rows), self._most_near)
        for _ in range(int(wanted.num_wanted.max()) - 1):
            self._launch_pass(graphs.next, rules)

    def _launch_pass(self, one: _Pass, rules: RuleTable | None) -> None:
        one.forward.replay()
        if rules is None:
            one.draw.replay()
        else:
            self._device.launch(lambda: self._draw(one.forward.outputs, rules, is_first=one.is_first))

    def _passes(self, plan: Captured[PlanColumns], num_rows: int, far: int, captured: Capture) -> _DraftGraphs:
        near, most_near = self._near_tokens(num_rows), self._most_near
        return _DraftGraphs(
            far=self._pass(lambda: self._begin(plan.outputs, far, None), captured, is_first=True),
            near=self._pass(lambda: self._begin(plan.outputs, near, most_near), captured, is_first=True),
            next=self._pass(lambda: self._go_on(plan.outputs), captured, is_first=False),
        )

    def _pass(self, forward: Callable[[], _Forwarded], captured: Capture, *, is_first: bool) -> _Pass:
        forwarded = captured(forward)
        return _Pass(forwarded, captured(lambda: self._draw(forwarded.outputs, None, is_first=is_first)), is_first)

    def _captured(self, work: Callable[[], T]) -> Captured[T]:
        return capture_filled(self._device, work)

    def _uncaptured(self, work: Callable[[], T]) -> Uncaptured[T]:
        return Uncaptured(self._device, work)

    def _near_tokens(self, num_rows: int) -> int:
        return max(num_rows, min(num_rows * self._most_near, MAX_VERIFIED_TOKENS))

    def _far_tokens(self, num_rows: int, spare_ns: int = 0) -> int:
        most = min(_CATCH_UP, self._limits.max_num_batched_tokens)
        if self._catch_up is not None:
            most = min(most, num_rows + self._catch_up.tokens_within(spare_ns))
        return max(self._near_tokens(num_rows), most)

    def _begin(self, plan: PlanColumns, num_tokens: int, max_query_len: int | None) -> _Forwarded:
        """max_query_len: the most tokens that a row computes; None is any number."""
        rows, num_rows = self._rows, self._limits.num_rows
        exists = plan.rows >= 0
        places = torch.where(exists, plan.rows, num_rows).long()
        index = plan.rows.clamp(min=0).long()
        known, finish = rows.draws.num_known[index], rows.state.finish[index]
        wanted = (plan.num_tokens - (known - rows.state.num_computed[index])).clamp(0, self.max_drafts)
        # The target draws a row's last token without a draft.
        until = torch.minimum(known + wanted, rows.draws.max_known[index] - 1).clamp(max=self._longest)
        wants = exists & (finish == 0) & (until > known)
        shift = self._parts.shift
        if shift:  # all that it reads has to be computed
            wants &= (known > shift) & (known - rows.state.num_computed[index] == 1)
        self._draws.num_known.copy_(rows.draws.num_known - shift)
        self._draws.num_prompt.copy_(rows.draws.num_prompt - shift)
        self._state.num_computed.copy_(rows.num_drafted)
        self._until.scatter_(0, places, until - shift)
        self._finish.fill_(FinishCode.ERROR).scatter_(0, places, torch.where(wants, 0, FinishCode.ERROR).int())
        behind = torch.where(wants, known - shift - rows.num_drafted[index], 0)
        shares = _shares(behind, self._most_near, num_tokens, max_query_len)
        return self._forward(PlanColumns(plan.rows, shares), num_tokens, max_query_len, is_first=True)

    def _go_on(self, plan: PlanColumns) -> _Forwarded:
        """A row that has its drafts, or an end token among them, has ended here."""
        num_rows = plan.rows.shape[0]
        return self._forward(PlanColumns(plan.rows, self._ones[:num_rows]), num_rows, 1, is_first=False)

    def _forward(self, plan: PlanColumns, num_tokens: int, max_query_len: int | None, *, is_first: bool) -> _Forwarded:
        start_ns = time.monotonic_ns()
        batch = step_inputs(self._state, plan, num_tokens, self._limits.block_size)
        draws = draw_inputs(self._state, self._draws, plan, batch, plan.rows.shape[0])
        if self._device.is_eager:
            batch, draws = unpadded(batch, draws)
        inputs = ForwardInputs(
            token_ids=self._known_to_it(batch.token_ids),
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            cu_seqlens=batch.cu_seqlens,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_tokens=draws.places,
            splits=self._splits,
            short_tokens=max_query_len or 1,
            max_query_len=max_query_len,
        )
        if not batch.token_ids.shape[0]:  # every row has ended, or has its drafts
            return _Forwarded(plan, batch, draws, torch.empty(0, 0))
        hidden = self._parts.hidden(inputs, draws.rows, is_first=is_first)
        if self._catch_up is not None:
            num_lacking = batch.token_ids.shape[0] - draws.rows.shape[0]
            self._catch_up.observe(num_lacking, time.monotonic_ns() - start_ns)
        return _Forwarded(plan, batch, draws, hidden)

    def _known_to_it(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Others are no error, but make drafts worse."""
        vocab_size = self._parts.vocab_size
        return token_ids if vocab_size >= self._limits.vocab_size else token_ids.clamp(max=vocab_size - 1)

    def _draw(self, forwarded: _Forwarded, rules: RuleTable | None, *, is_first: bool) -> None:
        """The rules are by the target's vocabulary."""
        rows, draws, vocab_size = self._rows, forwarded.draws, self._limits.vocab_size
        is_drawn = draws.rows.shape[0] > 0
        logits = self._parts.logits(forwarded.hidden, self._splits) if is_drawn else torch.empty(0, vocab_size)
        if logits.shape[1] > vocab_size:
            logits = logits[:, :vocab_size].contiguous()
        drawn = None
        if rules is not None and logits.shape[1] == vocab_size:
            drawn = DrawRules(rules, draws.rows, rows.state.token_ids, rows.draws.num_prompt)
        samples = sample(logits, draws.parameters, drawn, max_logprobs=-1)
        advance_rows(self._state, self._draws, forwarded.plan, forwarded.batch, draws, samples)
        # An end token is right or wrong without being verified.
        is_end = self._state.finish == FinishCode.END_TOKEN
        torch.sub(self._draws.num_known, is_end.int(), out=rows.state.num_held)
        if self._parts.shift:
            rows.state.num_held.add_(self._parts.shift)
        if is_first:
            rows.num_drafted.copy_(self._state.num_computed)
            # A row that is still behind has no draft to go on from.
            has_none = self._draws.num_known == rows.draws.num_known - self._parts.shift
            self._state.finish.masked_fill_(has_none, FinishCode.ERROR)


class _Behind:
    """How far rows are behind at most, by what the host knows of them."""

    def __init__(self, num_rows: int, most_near: int, shift: int) -> None:
        self._shift = shift
        self._computed: Int32Array = np.zeros(num_rows, dtype=np.int32)  # at least
        self._most_near = most_near

    def tell(self, rows: Int32Array) -> None:
        self._computed[rows] = 0

    def is_far(self, wanted: WantedDrafts) -> bool:
        behind = wanted.num_known - self._shift - self._computed[wanted.rows]
        return bool(behind.max() > _FAR_BEHIND * self._most_near)

    def take(self, wanted: WantedDrafts, num_tokens: int, most: int | None) -> None:
        """A first pass of so many tokens, and so many of a row, was launched."""
        rows, num_known = wanted.rows, np.maximum(wanted.num_known - self._shift, 0)
        behind = torch.from_numpy(np.maximum(num_known - self._computed[rows], 0))
        shares: Int32Array = _shares(behind, self._most_near, num_tokens, most).numpy()
        # The step in flight may bring this much less than it may.
        least_known = num_known - self._most_near + 1
        self._computed[rows] = np.maximum(np.minimum(self._computed[rows] + shares, least_known), 0)


def _shares(behind: torch.Tensor, most_near: int, num_tokens: int, most: int | None) -> torch.Tensor:
    """How many tokens each row computes, [num_rows] int32: those near all they lack, what is left row by row."""
    behind = behind.long() if most is None else behind.long().clamp(max=most)
    near = behind.clamp(max=most_near)
    far = behind - near
    left = num_tokens - near.sum() - (far.cumsum(0) - far)
    shares = near + torch.minimum(far, left).clamp(min=0)
    left = num_tokens - (shares.cumsum(0) - shares)
    return torch.minimum(shares, left).clamp(min=0).int()
