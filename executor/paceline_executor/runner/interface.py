"""What the step loop asks of a device: launch one flat batch, and hand over the sampled tokens once they are there.

Knows arrays only: requests, plans, rows' histories and gRPC stay on the other side of this seam.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

StepHandle = object
"""A runner knows a launched step by it; nobody else looks inside."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """`num_blocks` blocks of `block_size` slots in each of `num_layers` layers."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class HostTokenLists:
    """Those of row i are `token_ids[cu_lens[i]:cu_lens[i + 1]]`."""

    cu_lens: Int32Array  # [num_rows + 1]
    token_ids: Int32Array

    @classmethod
    def of(cls, lists: Sequence[Int32Array]) -> "HostTokenLists":
        cu_lens = np.zeros(len(lists) + 1, dtype=np.int32)
        np.cumsum([one.size for one in lists], out=cu_lens[1:])
        return cls(cu_lens, np.concatenate(lists) if lists else NO_TOKENS)

    def list_of(self, index: int) -> Int32Array:
        return self.token_ids[self.cu_lens[index] : self.cu_lens[index + 1]]


@dataclass(frozen=True, slots=True)
class LogitRuleColumns:
    """See `paceline_kernels.sampling` for the order.

    One element or list per draw. A row without rules has empty lists, and penalties of 0, 0 and 1. prompt is filled in
    for rows with a repetition penalty, each of its tokens once, output for rows with any.
    """

    allowed: HostTokenLists  # the only tokens that may be drawn; empty allows all
    forbidden: HostTokenLists
    biased: HostTokenLists
    biases: Float32Array  # one per token of `biased`
    presence_penalty: Float32Array  # [num_draws]
    frequency_penalty: Float32Array  # [num_draws]
    repetition_penalty: Float32Array  # [num_draws]
    prompt: HostTokenLists
    output: HostTokenLists


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """One element per draw, every value already resolved and in range. A sampled batch row has a draw, and one more for
    each of its drafts.

    temperature: 0 means greedy. top_k: 0 means unlimited. seeds and offsets key the noise: offset is the index of the
    output token that is drawn. num_logprobs: -1 means none asked, 0 the chosen token only, n > 0 also the n best.
    rules: None when no draw has any, which costs nothing.
    """

    temperature: Float32Array  # [num_draws]
    top_k: Int32Array  # [num_draws]
    top_p: Float32Array  # [num_draws]
    min_p: Float32Array  # [num_draws]
    seeds: UInt64Array  # [num_draws]
    offsets: Int32Array  # [num_draws]
    num_logprobs: Int32Array  # [num_draws]
    rules: LogitRuleColumns | None = None

    @classmethod
    def greedy(cls, num_draws: int) -> "SamplingColumns":
        zeros: Int32Array = np.zeros(num_draws, dtype=np.int32)
        none: Float32Array = np.zeros(num_draws, dtype=np.float32)
        return cls(none, zeros, none + 1, none, zeros.astype(np.uint64), zeros, zeros - 1)

    def of(self, draws: Sequence[int] | Int32Array | BoolArray) -> "SamplingColumns":
        """Those of these draws, without rules."""
        return SamplingColumns(*(getattr(self, column.name)[draws] for column in fields(self)[:-1]))


NOTHING_SAMPLED = SamplingColumns.greedy(0)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Which tokens rows may draw: that of token t is bit `t % 32` of word `t // 32`. Masks of a row follow each other:
    that of its first draw, and one behind each draft.
    """

    rows: Int32Array  # [num_masked] of the executor
    offsets: Int32Array  # [num_masked] of the output tokens that are drawn first
    starts: Int32Array  # [num_masked] their masks
    words: Int32Array  # [num_masks, vocab / 32, rounded up]

    def before_output(self, num_rows: int) -> Int32Array:
        """Returns [num_rows] of the executor: what an output token's offset is added to for its mask; with any offset
        below 0 for a row that has none.
        """
        before = np.full(num_rows, NO_MASK, dtype=np.int32)
        before[self.rows] = self.starts - self.offsets
        return before


NO_MASK = -(2**30)


@dataclass(frozen=True, slots=True)
class ForcedDrafts:
    """What a row's form says in advance, behind the tokens that its host knew: drafts, in place of any others."""

    rows: Int32Array  # [num_forced] of the executor
    starts: Int32Array  # [num_forced] positions of the first tokens
    token_ids: HostTokenLists  # none is empty


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The first `num_tokens[i]` tokens that batch row `rows[i]` computes are followed by the next `num_tokens[i]` of
    `token_ids`, whose log-probabilities are wanted. None of those positions is sampled.
    """

    rows: Int32Array  # [num_rows] batch rows, ascending
    num_tokens: Int32Array  # [num_rows], at least 1
    num_top: Int32Array  # [num_rows] alternatives wanted of each token, at least 0
    token_ids: Int32Array  # [sum(num_tokens)]


@dataclass(frozen=True, slots=True)
class RowDescriptions:
    """All there is to know of rows but blocks, one element of each column per row. Tokens behind the known ones are the
    runner's own.
    """

    rows: Int32Array  # [num_described] of the executor
    num_prompt: Int32Array  # [num_described]
    num_computed: Int32Array  # [num_described]
    max_known: Int32Array  # [num_described] at so many tokens the row ends
    end_token_ids: Int32Array  # [num_described, most of any row], padded with -1: tokens that end the row
    sampling: SamplingColumns  # offsets and rules mean nothing here
    rules: tuple[RowRules | None, ...]
    known: HostTokenLists  # of prompt and output, from the first on

    @property
    def num_known(self) -> Int32Array:
        return np.diff(self.known.cu_lens)


NOTHING_DESCRIBED = RowDescriptions(
    rows=NO_TOKENS,
    num_prompt=NO_TOKENS,
    num_computed=NO_TOKENS,
    max_known=NO_TOKENS,
    end_token_ids=NO_TOKENS.reshape(0, 1),
    sampling=NOTHING_SAMPLED,
    rules=(),
    known=HostTokenLists.of([]),
)


@dataclass(frozen=True, slots=True)
class BlockCells:
    """These cells are filled, or filled anew."""

    rows: Int32Array  # [num_cells] of the executor
    indices: Int32Array  # [num_cells] in the row's table
    block_ids: Int32Array  # [num_cells]


NO_CELLS = BlockCells(NO_TOKENS, NO_TOKENS, NO_TOKENS)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step computes of rows that the runner keeps: batch row i the next `num_tokens[i]` tokens of `rows[i]`.

    The runner is told of `described` and `cells` before. A row in `described` is as it is described, whatever the
    runner remembers of it; of any other row it remembers what is right. It knows what rows drew in steps in flight:
    one that ended there computes and draws nothing, and contexts are what rows come to at most.

    `sampled` names the batch rows whose last token's logits are sampled, ascending. Such a row may have `num_drafts`
    drafts, which the runner finds, and which are among its tokens; the logits of each, and of the token before them,
    are sampled too. One pays that is right with `min_draft_chance`; what the drafter has not computed of rows may take
    `draft_spare_ns`. `num_drafts` is None when no row may have any, `prompt_targets` when nobody asked for
    log-probabilities of a prompt. `is_masked`: nothing is drawn before `Runner.draw`. `forced`: those of the drafts
    that forms know.
    """

    rows: Int32Array  # [num_rows] of the executor
    num_tokens: Int32Array  # [num_rows]
    context_lens: Int32Array  # [num_rows]
    sampled: Int32Array  # [num_sampled]
    described: RowDescriptions
    cells: BlockCells  # of the batch's rows, those told before left out
    prompt_targets: PromptTargets | None = None
    num_drafts: Int32Array | None = None  # [num_sampled]
    min_draft_chance: float = 0.0
    draft_spare_ns: int = 0
    is_masked: bool = False
    forced: ForcedDrafts | None = None


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All that a host computes with: chunks and decodes mixed, batch row after batch row.

    Batch row i computes the tokens `cu_seqlens[i]:cu_seqlens[i + 1]`; its last token sits at position `context_lens[i]
    - 1`. KV slots of position p of row i: block `block_tables[i, p // block_size]`, slot `p % block_size`. `sampled`,
    `prompt_targets` and `num_drafts` as in StepBatch; a row's drafts are its last tokens.
    """

    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    cu_seqlens: Int32Array  # [num_rows + 1]
    context_lens: Int32Array  # [num_rows]
    block_tables: Int32Array  # [num_rows, max_blocks_per_row]
    sampled: Int32Array  # [num_sampled]
    sampling: SamplingColumns
    prompt_targets: PromptTargets | None = None
    num_drafts: Int32Array | None = None  # [num_sampled]
    masks: StepMasks | None = None
    mask_of_draw: Int32Array | None = None  # [num_draws], below 0 for none; with masks


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Natural logarithms, each given the tokens before it, of the distribution as the model made it."""

    logprobs: Float32Array  # [num_tokens]
    top_token_ids: Int32Array  # [num_tokens, num_top], best first
    top_logprobs: Float32Array  # [num_tokens, num_top]

    def of(self, tokens: slice, num_top: int) -> "StepLogprobs":
        """Returns views, with so many alternatives."""
        return StepLogprobs(
            self.logprobs[tokens], self.top_token_ids[tokens, :num_top], self.top_logprobs[tokens, :num_top]
        )

    def where(self, is_kept: BoolArray) -> "StepLogprobs":
        return StepLogprobs(self.logprobs[is_kept], self.top_token_ids[is_kept], self.top_logprobs[is_kept])


class RowProblem(enum.Enum):
    NOT_FINITE = "a logit is NaN or infinite"
    NOTHING_LEFT = "the row's rules and its mask leave no token"
    FORM = "the form of the row's output cannot be followed"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A batch row that failed alone is in `problems`, and drew no token. Of a row with drafts, as many of its draws are
    accepted as `acceptance` says.

    `logprobs` has as many alternatives as any sampled row asked for: of a row, as many as it asked for mean anything.
    """

    num_accepted: Int32Array  # [num_sampled] tokens of each; 0 also for rows that had ended
    token_ids: Int32Array  # [sum(num_accepted)]
    logprobs: StepLogprobs | None  # of `token_ids`; None when no sampled row asked
    problems: dict[int, RowProblem]  # batch row -> what was wrong
    forward_ns: int
    sample_ns: int
    prompt_logprobs: dict[int, StepLogprobs] = field(default_factory=dict)  # batch row -> of its targets
    num_verified: Int32Array | None = None  # [num_sampled] drafts; None: those of the batch
    draft_ns: int = 0  # before the forward pass


@dataclass(frozen=True, slots=True)
class WarmUpProgress:
    """`index` of `num_steps`, counted from 0, is about to begin."""

    step: str
    index: int
    num_steps: int


class StepLostError(Exception):
    """A step failed while it was computed, by its cause. Nothing behind it has run: it can be taken back."""


class Runner(Protocol):
    """All methods are called from one thread, the step thread.

    Steps run in the order of their launches, each after those before it, and are waited for in that order.
    """

    @property
    def max_in_flight(self) -> int: ...

    @property
    def kv_geometry(self) -> CacheGeometry:
        """Returns the shape as allocated."""
        ...

    @property
    def profiler(self) -> Profiler:
        """Whoever records its steps, the same one always."""
        ...

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        """Runs every code path once so that nothing compiles later; returns measured (num_tokens, step ns) points."""
        ...

    def launch(self, batch: StepBatch) -> StepHandle:
        """Starts to write the batch's KV, compute logits and sample. A failure fails this step alone: nothing behind it
        runs, and it can be taken back.
        """
        ...

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        """Those of each sampled row of a masked step, before it draws; None if no row has any. Waits until they are
        found.
        """
        ...

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        """Of the step launched last, whose batch is masked, when those before it have been waited for. masks: None
        draws what nobody wants, so that the step ends. A failure is as one of `launch`.
        """
        ...

    def is_done(self, handle: StepHandle) -> bool:
        """`wait` would return at once."""
        ...

    def wait(self, handle: StepHandle) -> StepOutput:
        """Raises StepLostError where this step alone failed, as will all that are in flight behind it. Any other
        exception means that the device failed, and ends the process.
        """
        ...

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """Copies block `sources[i]` to block `destinations[i]` in all layers."""
        ...


def output_of(handle: StepHandle) -> StepOutput:
    """For a runner that computes in `launch`."""
    if not isinstance(handle, StepOutput):
        raise TypeError(f"a step is waited for by the handle of its launch, not by {handle!r}")
    return handle
