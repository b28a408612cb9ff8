"""The GPU runner on its twin, computing hashes: a GPU's rows, rings, captures and draws with a `HashRunner`'s tokens.

So what is tested with a hash runner is tested on the GPU's runner, and `continuation` says what must come of it there,
too. Refuses to know who plans.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from drafting.drafters import row_of
from executor_rig.hash_runner import HashRunner
from executor_rig.random_plans import FragileRunner
from paceline_executor.limits import RowLimits
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.drafts import DeviceDrafter, launching
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.drafter import Drafter
from paceline_executor.runner.interface import (
    Int32Array,
    RowProblem,
    StepBatch,
    StepHandle,
    StepLogprobs,
    StepOutput,
)
from paceline_executor.runner.simulated import logprobs_of, prompt_logprobs_of
from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden
from paceline_kernels.step_inputs import PlanColumns

_APART = 1e4  # logits of neighbours: no noise, bias or penalty comes near
_PROBLEMS = {RowProblem.NOT_FINITE: float("nan"), RowProblem.NOTHING_LEFT: float("-inf")}


class HashModel:
    """A DeviceModel. Keys are token ids, in the hash runner's own slots; hidden states are the tokens to draw.

    `problems`: of rows of the plan, by step. reads: hears of contexts that tokens are drawn behind.
    """

    vocabulary = None
    weight_bytes = 0
    windows = (None,)

    def __init__(self, inner: HashRunner, vocab_size: int, reads: Callable[[Int32Array], None]) -> None:
        self.problems: dict[int, dict[int, RowProblem]] = {}
        self.runner: TwinHashRunner | None = None
        self._inner = inner
        self._reads = reads
        self._ids = torch.arange(vocab_size)

    def hidden(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,
        aux: AuxHidden | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See DeviceModel. Returns [num_logits, 1] float32: what is no number is no token."""
        slots, num_tokens = kv_cache.keys.numpy()[0], int(inputs.cu_seqlens[-1])
        places = inputs.slot_mapping.numpy()[:num_tokens]
        if (places < 0).any():
            raise AssertionError("a token has no block to be written to")
        slots.reshape(-1)[places] = inputs.token_ids.numpy()[:num_tokens]
        step, rows = self._planned()
        problems = self.problems.pop(step, {})
        drawn = [self._after(place, inputs, slots, rows, problems) for place in inputs.logit_tokens.tolist()]
        return torch.tensor(drawn, dtype=torch.float32)[:, None]

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        """The token is the likeliest, then come its neighbours: masks leave the nearest."""
        del splits
        is_token = hidden.isfinite()
        tokens = torch.where(is_token, hidden, 0.0).to(torch.int64)
        logits = -_APART * ((self._ids - tokens) % self._ids.numel()).to(torch.float32)
        return torch.where(is_token, logits, hidden)

    def _planned(self) -> tuple[int, list[int]]:
        """The step that runs, and its rows. Of what runs in front of a step they mean nothing."""
        assert self.runner is not None, "it runs on a device"
        ring, step = self.runner._steps._rings.plans, int(self.runner._steps._step)
        slot = step % ring.counts.shape[0]
        return step, ring.rows[slot, : int(ring.counts[slot, 1])].tolist()

    def _after(
        self,
        place: int,
        inputs: ForwardInputs,
        slots: Int32Array,
        rows: Sequence[int],
        problems: dict[int, RowProblem],
    ) -> float:
        if place < 0:
            return float("nan")
        planned = int(np.searchsorted(inputs.cu_seqlens.numpy(), place, side="right")) - 1
        position = int(inputs.positions[place])
        table = inputs.block_tables[planned, : position // slots.shape[1] + 1].numpy()
        context = slots[table].reshape(-1)[: position + 1]
        self._reads(context)
        if planned in problems:
            return _PROBLEMS[problems[planned]]
        if context[-1] in self._inner.faulty_tokens:
            return float("nan")
        seed, offset = self._key(rows[planned], position) if planned < len(rows) else (0, 0)
        return self._inner.rule.next_token(context.tolist(), seed, offset)

    def _key(self, row: int, position: int) -> tuple[int, int]:
        """What the device keeps of the row is part of its hashes."""
        assert self.runner is not None, "it runs on a device"
        draws = self.runner._rows.draws
        return int(draws.seeds[row]) % 2**64, position + 1 - int(draws.num_prompt[row])


class TwinHashRunner(DeviceRunner):
    """`inner` keeps the slots, and is there to break it. `device` is the twin."""

    def __init__(
        self,
        inner: HashRunner,
        limits: RowLimits,
        *,
        drafter: DeviceDrafter | None = None,
        reads: Callable[[Int32Array], None] = lambda _: None,
    ) -> None:
        self.device, self._inner = TwinDevice(), inner
        self._batches: deque[StepBatch] | None = None  # of the steps in flight; None in the warm-up
        self._spoilt: StepHandle | None = None
        self._hashes = HashModel(inner, limits.vocab_size, reads)
        slots, held = torch.from_numpy(inner._slots)[None], inner._slots.copy()
        buckets = buckets_of(limits.num_rows, limits.max_num_batched_tokens, limits.max_num_draft_tokens)
        cache, geometry = KvCache(slots, slots), inner.kv_geometry
        drafting = None if drafter is None else launching(drafter, limits.max_num_draft_tokens)
        super().__init__(self.device, self._hashes, cache, geometry, limits, buckets=buckets, drafting=drafting)
        self._hashes.runner = self
        super().warm_up()
        inner._slots[:] = held
        self._batches = deque()

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        return self._inner.warm_up()

    def launch(self, batch: StepBatch) -> StepHandle:
        """Held up, refused, and with problems as the runner inside would be."""
        if self._batches is None:
            return super().launch(batch)
        error, self._hashes.problems[self._next_step] = self._inner.begin_step()
        self.device.fail_next = error or self._failure("forward pass")
        launched = super().launch(batch)
        self._batches.append(batch)
        if batch.sampled.size and self._failure("output"):
            self._spoilt = launched
        return launched

    def wait(self, handle: StepHandle) -> StepOutput:
        """Times and log-probabilities are told as hash runners tell them. A spoilt answer does not fit."""
        output = super().wait(handle)
        if self._batches is None:
            return output
        batch = self._batches.popleft()
        prompt_logprobs = prompt_logprobs_of(batch.prompt_targets)
        for row, found in output.prompt_logprobs.items():
            _check(found, _targets_of(batch, row), self._limits.vocab_size)
        logprobs = output.logprobs
        if logprobs is not None:
            asked = np.repeat(self._rows.num_logprobs[batch.rows[batch.sampled]], output.num_accepted)
            _check(logprobs.where(asked > 0), output.token_ids[asked > 0], self._limits.vocab_size)
            logprobs = logprobs_of(output.token_ids, logprobs.top_token_ids.shape[1])
        token_ids = output.token_ids[:0] if handle is self._spoilt else output.token_ids
        step_ns = self._inner._step_times.step_ns(int(batch.num_tokens.sum()), 0)
        output = replace(output, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return replace(output, forward_ns=step_ns, sample_ns=0)

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        self.device.fail_next = self._failure("copy")
        super().copy_blocks(sources, destinations)

    def key_of(self, token_ids: Int32Array) -> tuple[int, int]:
        """See `simulation.drafting`."""
        draws, row = self._rows.draws, row_of(token_ids, self._rows.state.token_ids.numpy())
        return int(draws.seeds[row]) % 2**64, int(draws.num_prompt[row])

    def _failure(self, place: str) -> Exception | None:
        if not isinstance(self._inner, FragileRunner) or self._inner.fails_in != place:
            return None
        self._inner.fails_in = ""
        return RuntimeError("device lost")


class HostDrafter:
    """On the device what `inner`, a drafter of the host, finds behind the tokens that the device has by then."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner = inner
        self._vocab_size = vocab_size

    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        for row, planned in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if row >= 0 and not rows.state.finish[row]:
                num_wanted = planned - int(rows.draws.num_known[row] - rows.state.num_computed[row])
                if num_wanted > 0:
                    self._draft(row, num_wanted, rows)

    def _draft(self, row: int, num_wanted: int, rows: RowWords) -> None:
        tokens, num_known = rows.state.token_ids[row].numpy(), int(rows.draws.num_known[row])
        found = self.inner.draft(tokens[:num_known], num_wanted, float(rows.min_chance))[:num_wanted]
        is_bad = (found < 0) | (found >= self._vocab_size)
        found = found[: is_bad.argmax()] if is_bad.any() else found
        tokens[num_known : num_known + found.size] = found
        rows.state.num_held[row] = num_known + found.size


def _targets_of(batch: StepBatch, row: int) -> Int32Array:
    targets = batch.prompt_targets
    assert targets is not None, "they were asked for"
    (place,) = np.flatnonzero(targets.rows == row)
    end = int(targets.num_tokens[: place + 1].sum())
    return targets.token_ids[end - targets.num_tokens[place] : end]


def _check(found: StepLogprobs, token_ids: Int32Array, vocab_size: int) -> None:
    """A token is as unlikely as it is far from the likeliest."""
    for chosen, token_id, top in zip(found.logprobs, token_ids, found.top_token_ids, strict=True):
        if top.size and chosen != -_APART * ((token_id - top[0]) % vocab_size):
            raise AssertionError(f"token {token_id} behind {top} is not of log-probability {chosen}")
