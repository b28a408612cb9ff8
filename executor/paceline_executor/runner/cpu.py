"""The CPU runner: a model, its paged KV cache in memory, and the threads that compute.

Refuses to know requests and plans.

All methods belong to one thread, the step thread: the pool of worker threads is the property of the thread that first
uses it, and a second one makes both slow. torch's own threads are never used.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from paceline_executor.errors import StartError
from paceline_executor.models.registry import build_model
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.profiling.host_trace import HostProfiler
from paceline_executor.runner.acceptance import counting_draws, first_draws, num_valid_tokens, places_of_draws
from paceline_executor.runner.cores import usable_cores
from paceline_executor.runner.drafter import Drafter, NoDrafter, TimedDrafter
from paceline_executor.runner.host_rows import HostRows
from paceline_executor.runner.inputs import forward_inputs, logit_rules, row_problem, sampling_parameters
from paceline_executor.runner.interface import (
    BoolArray,
    CacheGeometry,
    FlatBatch,
    Int32Array,
    SamplingColumns,
    StepBatch,
    StepHandle,
    StepLogprobs,
    StepObserver,
    StepOutput,
    WarmUpProgress,
    output_of,
)
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.runner.measuring import chunk, fastest_ns
from paceline_executor.runner.prompt_logprobs import Piece, by_row, part, pieces_of, rest
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_kernels.block_copy import block_copy
from paceline_kernels.compiler import jit
from paceline_kernels.decoder import AuxHidden, PhaseTime
from paceline_kernels.sampling import SampleOutcome, Samples, sample, token_logprobs
from paceline_kernels.vector.integers import this_processor
from paceline_kernels.warm_up.compile_process import have_ready

# The scheduler fits its prediction to these step times.
_MEASURED_TOKENS = (1, 16, 64, 256)
_NORMS = ("rms_norm", "add_rms_norm", "rms_norm_heads")
_IN_FLOAT32 = ("linear", *_NORMS, "gate_and_multiply", "softcap", "rope_and_write_kv", "paged_attention")
_DECODERS = {KvDtype.INT8: "decoder over int8", KvDtype.FLOAT16: "decoder over float16"}


def operations_of(numerics: Numerics) -> tuple[str, ...]:
    """As `paceline_kernels.warm_up.calls` names them."""
    model = _IN_FLOAT32 if numerics.matrices is MatrixKind.DENSE else (_DECODERS[numerics.kv],)
    return (*model, "sample", "sample by rules")


class CpuRunner:
    """See `runner.interface.Runner`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_blocks: int,
        block_size: int,
        numerics: Numerics = FLOAT32_NUMERICS,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        on_progress: Callable[[WarmUpProgress], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """max_model_len: the longest row, in tokens; None is what the model allows. Never more than the blocks hold.
        num_threads: how many threads compute, the step thread included; None is one per usable core. on_progress is
        called during `warm_up`. Raises UnsupportedModelError, and StartError for too little memory or too many threads.
        """
        self._num_threads = checked_threads(num_threads)
        self._on_progress = on_progress
        self._clock_ns = clock_ns
        self._numerics = numerics
        self._geometry = kv_geometry(checkpoint.config, num_blocks, block_size, numerics)
        self._kv_cache = allocate_kv_cache(self._geometry, numerics.kv)
        self._max_model_len = min(num_blocks * block_size, max_model_len or checkpoint.config.max_model_len)
        self._model = build_model(checkpoint, self._max_model_len, numerics.matrices)
        self.profiler = HostProfiler(clock_ns)
        self._hidden_size = checkpoint.config.hidden_size
        self._vocab_size = checkpoint.config.vocab_size
        self._observer: StepObserver | None = None
        self.draft_by(NoDrafter())

    @property
    def kv_geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def max_in_flight(self) -> int:
        return 1

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def instructions(self) -> str:
        """Returns "AVX-512 VNNI", "AVX2" or "none"."""
        return this_processor().value

    @property
    def embed(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._model.embed

    def draft_by(self, drafter: Drafter) -> None:
        """From now on. All rows are to be described anew."""
        timed = TimedDrafter(drafter, self._clock_ns, self.profiler)
        self._rows = HostRows(self._geometry.block_size, self._vocab_size, timed)

    def observe_by(self, observer: StepObserver) -> None:
        """Hidden states of all steps from now on go to it."""
        self._observer = observer

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        """Another process compiles for about a minute, once; the code is stored on disk."""
        operations = operations_of(self._numerics)
        sizes = [size for size in _MEASURED_TOKENS if size <= self._max_model_len]
        num_steps = len(operations) + len(sizes)

        def on_operation(name: str, is_compiled: bool) -> None:
            phase = f"compile {name}" if is_compiled else f"read {name}"
            self._on_progress(WarmUpProgress(phase, operations.index(name), num_steps))

        have_ready(operations, on_operation)
        points = []
        for index, size in enumerate(sizes, start=len(operations)):
            self._on_progress(WarmUpProgress(f"measure a step of {size} tokens", index, num_steps))
            batch = chunk(size, self._geometry.block_size)
            points.append((size, fastest_ns(partial(self.launch, batch))))
        return tuple(points)

    def launch(self, batch: StepBatch) -> StepOutput:
        """Computes the whole step; its output is its handle."""
        return self._rows.step(batch, self.compute)

    def compute(self, batch: FlatBatch) -> StepOutput:
        """Raises KernelArgumentError or IndexError for a batch that names what does not exist."""
        jit.set_num_threads(self._num_threads)
        start_ns = self._clock_ns()
        pieces = pieces_of(batch.prompt_targets)
        prompt_logprobs, problems = by_row((piece.row, self._prompt_logprobs(batch, piece)) for piece in pieces)
        left = rest(batch)
        logits, aux = torch.empty(0, 1), None
        if left.token_ids.size:
            logits, aux = self._forward(left, places_of_draws(left))
        forwarded_ns = self._clock_ns()
        samples = _sample(logits, left.sampling)
        outcomes, token_ids = samples.outcomes.numpy(), samples.token_ids.numpy()
        of_first = outcomes[first_draws(left)]
        for index in np.flatnonzero(of_first):
            # What is wrong with the prompt is wrong with all that follows it.
            problems.setdefault(int(batch.sampled[index]), row_problem(int(of_first[index])))
        num_accepted, counts = counting_draws(left, token_ids, outcomes == SampleOutcome.DRAWN)
        if problems:
            num_accepted, counts = _without(batch, list(problems), num_accepted, counts)
        sampled_ns = self._clock_ns()
        if self.profiler.is_on:
            self.profiler.add("forward", start_ns, forwarded_ns)
            self.profiler.add("draw", forwarded_ns, sampled_ns)
        if aux is not None:
            self._tell(left, aux, num_valid_tokens(left, num_accepted))
        return StepOutput(
            num_accepted=num_accepted,
            token_ids=token_ids[counts],
            logprobs=_logprobs(samples, batch, counts),
            problems=problems,
            forward_ns=forwarded_ns - start_ns + self._clock_ns() - sampled_ns,
            sample_ns=sampled_ns - forwarded_ns,
            prompt_logprobs=prompt_logprobs,
        )

    def is_done(self, handle: StepHandle) -> bool:
        return output_of(handle) is handle

    def wait(self, handle: StepHandle) -> StepOutput:
        return output_of(handle)

    def _forward(self, batch: FlatBatch, logit_tokens: Int32Array) -> tuple[torch.Tensor, AuxHidden | None]:
        """The logits are valid until the next forward pass."""
        aux = None
        if self._observer is not None:
            layers = self._observer.aux_layers
            aux = AuxHidden(layers, torch.empty(batch.token_ids.size, len(layers), self._hidden_size))
        inputs = forward_inputs(batch, self._geometry.block_size, logit_tokens)
        times: list[PhaseTime] | None = [] if self.profiler.is_on else None
        logits = self._model.forward(inputs, self._kv_cache, aux=aux, times=times)
        for phase in times or ():
            self.profiler.add_kernel(phase.phase, phase.layer, phase.start_ns, phase.end_ns, phase.num_bytes)
        return logits, aux

    def _tell(self, batch: FlatBatch, aux: AuxHidden, num_valid: Int32Array) -> None:
        assert self._observer is not None
        self._observer.observe(batch, aux.states.numpy(), num_valid)

    def _prompt_logprobs(self, batch: FlatBatch, piece: Piece) -> StepLogprobs:
        mine, num_tokens = part(batch, piece), piece.stop - piece.start
        logits, aux = self._forward(mine, np.arange(num_tokens, dtype=np.int32))
        if aux is not None:
            self._tell(mine, aux, np.array([num_tokens], dtype=np.int32))
        num_top = torch.full((num_tokens,), piece.num_top, dtype=torch.int32)
        values = token_logprobs(logits, torch.from_numpy(np.array(piece.target_token_ids)), num_top)
        return StepLogprobs(values.logprobs.numpy(), values.top_token_ids.numpy(), values.top_logprobs.numpy())

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """Raises KernelArgumentError for a block that does not exist, or is source and destination."""
        pairs = [torch.from_numpy(np.array(blocks, dtype=np.int32)) for blocks in (sources, destinations)]
        block_copy(self._kv_cache.keys, *pairs)
        block_copy(self._kv_cache.values, *pairs)
        if self._observer is not None:
            self._observer.copy_blocks(sources, destinations)


def checked_threads(num_threads: int | None) -> int:
    """None is one per usable core. Raises StartError for more than there are."""
    most = jit.max_threads()
    chosen = min(usable_cores(), most) if num_threads is None else num_threads
    if not 1 <= chosen <= most:
        raise StartError(f"the number of threads must be 1 to {most}, the cores this process may use, not {chosen}")
    return chosen


def _sample(logits: torch.Tensor, columns: SamplingColumns) -> Samples:
    rules = None if columns.rules is None else logit_rules(columns.rules)
    return sample(logits, sampling_parameters(columns), rules)


def _without(
    batch: FlatBatch, failed: list[int], num_accepted: Int32Array, counts: BoolArray
) -> tuple[Int32Array, BoolArray]:
    """Drops the draws of batch rows that failed."""
    is_well = ~np.isin(batch.sampled, failed)
    num_draws = 1 if batch.num_drafts is None else batch.num_drafts + 1
    return np.where(is_well, num_accepted, 0).astype(np.int32), counts & np.repeat(is_well, num_draws)


def _logprobs(samples: Samples, batch: FlatBatch, counts: BoolArray) -> StepLogprobs | None:
    """Of draws that count, where any row wants them."""
    if batch.sampling.num_logprobs.max(initial=-1) < 0:
        return None
    columns = (samples.logprobs, samples.top_token_ids, samples.top_logprobs)
    return StepLogprobs(*(column.numpy() for column in columns)).where(counts)
