"""The runner without a model: it keeps token ids in its KV slots and draws tokens from what it reads there.

The next token is a hash of the ids read through the row's block table, the seed and the offset, so a lost, doubled or
reordered token, or a block wrongly reused, changes every token after it. Steps take the time that a table says.

The hash of ids t at positions p is the sum of (t + 1) * B**p modulo 2**64, put together from a digest for each block: a
step costs as many additions as tables have blocks, not as rows have tokens. That of the last block counts only what the
row has in it.
"""

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from paceline_executor.profiling.host_trace import HostProfiler
from paceline_executor.runner.acceptance import counting_draws, places_of_draws
from paceline_executor.runner.drafter import Drafter, NoDrafter, TimedDrafter
from paceline_executor.runner.host_rows import BegunStep, HostRows
from paceline_executor.runner.interface import (
    CacheGeometry,
    FlatBatch,
    HostTokenLists,
    Int32Array,
    PromptTargets,
    RowProblem,
    StepBatch,
    StepHandle,
    StepLogprobs,
    StepMasks,
    StepOutput,
    UInt64Array,
    output_of,
)
from paceline_executor.runner.step_times import StepTimeCurve

BYTES_PER_TOKEN = 4  # of KV cache: its id
HASH_BASE = 0x9E3779B97F4A7C15  # 5 modulo 8, so that its powers differ as long as they can
NOTHING_LEFT = -1  # in place of a token, where masks leave none
EMPTY_SLOT = -1  # adds nothing to a hash
_NO_TIME = StepTimeCurve()
_ANOTHER_SIZE = 512  # by one point nobody knows what a token costs
_NO_TIME_POINTS = ((1, 1000), (64, 2000))  # what schedulers are told where steps take no time


def logprobs_of(token_ids: Sequence[int] | Int32Array, num_top: int) -> StepLogprobs:
    tokens, ranks = np.array(token_ids, dtype=np.float32), np.arange(num_top)
    return StepLogprobs(
        logprobs=np.array(-tokens / 8, dtype=np.float32),
        top_token_ids=np.tile(ranks.astype(np.int32), (tokens.size, 1)),
        top_logprobs=np.array(-tokens[:, None] - ranks / 8, dtype=np.float32),
    )


def prompt_logprobs_of(targets: PromptTargets | None) -> dict[int, StepLogprobs]:
    if targets is None:
        return {}
    ends = np.cumsum(targets.num_tokens)
    columns = zip(targets.rows, ends - targets.num_tokens, ends, targets.num_top, strict=True)
    return {int(row): logprobs_of(targets.token_ids[start:end], int(num_top)) for row, start, end, num_top in columns}


@dataclass(slots=True, eq=False)
class _Masked:
    """A step that is computed when it is told what may be drawn."""

    step: BegunStep
    output: StepOutput | None = None


class SimulatedRunner:
    """Its tokens prove that the right slots were written and read.

    Tokens are drawn from `drawn` alone. Of a row's rules it acts on masks, by taking the next token id that is left; it
    has no logits to change.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        drawn: range | None = None,
        step_times: StepTimeCurve = _NO_TIME,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slots = np.full((num_blocks, block_size), EMPTY_SLOT, dtype=np.int32)
        self._digests = np.zeros(num_blocks, dtype=np.uint64)  # of whole blocks
        self._slot_factors = _powers(HASH_BASE, block_size)
        self._block_factors = _powers(pow(HASH_BASE, block_size, 1 << 64), num_blocks)
        self._vocab_size = vocab_size
        self._drawn = drawn or range(vocab_size)
        self._step_times = step_times
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._done_ns = 0  # when the launched step has ended
        self.profiler = HostProfiler()
        self.draft_by(NoDrafter())

    def draft_by(self, drafter: Drafter) -> None:
        """From now on. All rows are to be described anew."""
        self._rows = HostRows(self._slots.shape[1], self._vocab_size, TimedDrafter(drafter, self._clock_ns))

    @property
    def max_in_flight(self) -> int:
        return 1

    @property
    def kv_geometry(self) -> CacheGeometry:
        num_blocks, block_size = self._slots.shape
        return CacheGeometry(num_blocks, block_size, 1, 1, 1, block_size * BYTES_PER_TOKEN)

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        sizes = [num_tokens for num_tokens, _ in self._step_times.points]
        if len(sizes) == 1:
            sizes.append(sizes[0] + _ANOTHER_SIZE)
        points = ((num_tokens, self._step_times.step_ns(num_tokens, 0)) for num_tokens in sizes)
        return tuple(point for point in points if point[1]) or _NO_TIME_POINTS

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        self._slots[destinations] = self._slots[sources]
        self._digests[destinations] = self._digests[sources]

    def launch(self, batch: StepBatch) -> StepHandle:
        return _Masked(self._rows.begin(batch)) if batch.is_masked else self._rows.step(batch, self.compute)

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        return _masked(handle).step.drafts

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        masked = _masked(handle)
        masked.output = self._rows.end(masked.step, self.compute, masks)

    def compute(self, batch: FlatBatch) -> StepOutput:
        """Writes the batch's ids into their slots, then draws from what each sampled row's table leads to."""
        start_ns = self._clock_ns()
        self._write(batch)
        drawn = self._draw(batch)
        num_accepted, counts = counting_draws(batch, drawn, drawn != NOTHING_LEFT)
        token_ids = drawn[counts]
        num_top = int(batch.sampling.num_logprobs.max(initial=-1))
        prompt_logprobs = prompt_logprobs_of(batch.prompt_targets)
        due_ns = self._step_times.step_ns(batch.token_ids.size, _num_pairs(batch))
        step_ns = max(due_ns, self._clock_ns() - start_ns)
        self._done_ns = start_ns + step_ns
        return StepOutput(
            num_accepted=num_accepted,
            token_ids=token_ids,
            logprobs=logprobs_of(token_ids, num_top) if num_top >= 0 else None,
            problems=dict.fromkeys(batch.sampled[num_accepted == 0].tolist(), RowProblem.NOTHING_LEFT),
            forward_ns=step_ns,
            sample_ns=0,
            prompt_logprobs=prompt_logprobs,
        )

    def is_done(self, handle: StepHandle) -> bool:
        return output_of(_of_masked(handle)) is not None and self._clock_ns() >= self._done_ns

    def wait(self, handle: StepHandle) -> StepOutput:
        output, left_ns = output_of(_of_masked(handle)), self._done_ns - self._clock_ns()
        if left_ns > 0:
            self._sleep(left_ns / 1e9)
        return output

    def _write(self, batch: FlatBatch) -> None:
        ends = batch.cu_seqlens[1:]
        if (batch.positions[ends - 1] != batch.context_lens - 1).any():
            raise ValueError("the last token of a batch row sits at the end of its context")
        if batch.token_ids.min(initial=0) < 0:
            raise ValueError("a token that is not known is computed")
        rows = np.repeat(np.arange(ends.size), np.diff(batch.cu_seqlens))
        indices, slots = np.divmod(batch.positions, self._slots.shape[1])
        self._put(batch.block_tables[rows, indices], slots, batch.token_ids)

    def _put(self, blocks: Int32Array, slots: Int32Array, token_ids: Int32Array) -> None:
        if blocks.min(initial=0) < 0:
            raise ValueError("a token has no block to be written to")
        self._slots[blocks, slots] = token_ids
        written = np.unique(blocks)
        self._digests[written] = self._digest(self._slots[written])

    def _digest(self, ids: Int32Array) -> UInt64Array:
        """As if each block were the first of a row: [num_blocks, block_size] to [num_blocks]."""
        values = (ids + np.int64(1)).astype(np.uint64)  # of an empty slot 0
        digests: UInt64Array = (values * self._slot_factors).sum(axis=1, dtype=np.uint64)
        return digests

    def _context_hashes(self, batch: FlatBatch) -> UInt64Array:
        lens, block_size = batch.positions[places_of_draws(batch)] + 1, self._slots.shape[1]
        last = (lens - 1) // block_size
        width = int(last.max(initial=0)) + 1
        drawing = batch.sampled if batch.num_drafts is None else np.repeat(batch.sampled, batch.num_drafts + 1)
        tables = batch.block_tables[drawing, :width]
        is_before_last = np.arange(width) < last[:, None]
        digests = np.where(is_before_last, self._digests[tables], 0)
        hashes: UInt64Array = (digests * self._block_factors[:width]).sum(axis=1, dtype=np.uint64)
        ids = self._slots[tables[np.arange(lens.size), last]]
        is_of_row = np.arange(block_size) < (lens - last * block_size)[:, None]
        hashes += self._digest(np.where(is_of_row, ids, EMPTY_SLOT)) * self._block_factors[last]
        return hashes

    def _draw(self, batch: FlatBatch) -> Int32Array:
        sampling = batch.sampling
        noise = _mix(sampling.seeds + sampling.offsets.astype(np.uint64) * np.uint64(HASH_BASE))
        drawn = self._tokens_of(_mix(self._context_hashes(batch) ^ noise))
        if sampling.rules is not None or batch.mask_of_draw is not None:
            for index, token_id in enumerate(drawn.tolist()):
                drawn[index] = nearest_left(token_id, *self._left(batch, index), self._vocab_size)
        return drawn

    def _left(self, batch: FlatBatch, draw: int) -> tuple[set[int], set[int]]:
        """The allowed tokens, none for all, and the forbidden ones."""
        rules, allowed, forbidden = batch.sampling.rules, set[int](), set[int]()
        if rules is not None:
            allowed, forbidden = _listed(rules.allowed, draw), _listed(rules.forbidden, draw)
        if batch.masks is not None and batch.mask_of_draw is not None and batch.mask_of_draw[draw] >= 0:
            bits = np.unpackbits(batch.masks.words[batch.mask_of_draw[draw]].view(np.uint8), bitorder="little")
            forbidden |= set(np.flatnonzero(bits[: self._vocab_size] == 0).tolist())
        return allowed, forbidden

    def _tokens_of(self, hashes: UInt64Array) -> Int32Array:
        drawn: Int32Array = (hashes % np.uint64(len(self._drawn))).astype(np.int32) + np.int32(self._drawn.start)
        return drawn


def _powers(base: int, number: int) -> UInt64Array:
    """Returns 1, base, base**2, ... modulo 2**64."""
    factors = np.full(number, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mix(values: UInt64Array) -> UInt64Array:
    """The splitmix64 finaliser (Steele et al. 2014) of each number."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _num_pairs(batch: FlatBatch) -> int:
    """Pairs of a new token and one it attends to, itself included."""
    return int((batch.positions + np.int64(1)).sum())


def nearest_left(token_id: int, allowed: Set[int], forbidden: Set[int], vocab_size: int) -> int:
    """The first from this token on that masks leave, around the vocabulary; NOTHING_LEFT if none is. Without allowed
    tokens all are.
    """
    for step in range(vocab_size):
        candidate = (token_id + step) % vocab_size
        if candidate not in forbidden and (candidate in allowed or not allowed):
            return candidate
    return NOTHING_LEFT


def _masked(handle: StepHandle) -> _Masked:
    if not isinstance(handle, _Masked):
        raise TypeError(f"a step draws by the handle of its launch, not by {handle!r}")
    return handle


def _of_masked(handle: StepHandle) -> StepHandle:
    return handle.output if isinstance(handle, _Masked) else handle


def _listed(lists: HostTokenLists, index: int) -> set[int]:
    return set(lists.token_ids[lists.cu_lens[index] : lists.cu_lens[index + 1]].tolist())
