"""The GPU runner: rows live on the device, plans go up and results come down by rings, two steps are in flight.

The host writes what the device does not know into a plan's slot, replays two captured graphs, and looks at a result's
slot until the device has written the step's number. Refuses to know requests and plans. `device` may be a twin on the
CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from paceline_executor.errors import DEVICE_FAILED, DeviceFaultError
from paceline_executor.limits import MAX_LOGPROBS, RowLimits
from paceline_executor.models.interface import DeviceModel, KvCache
from paceline_executor.profiling.bandwidth import ATTENTION, LINEAR, context_bytes
from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.device.buckets import Bucket, Buckets
from paceline_executor.runner.device.device import Device
from paceline_executor.runner.device.drafts import MakeDrafting, WantedDrafts, lookups
from paceline_executor.runner.device.kept_rules import KeptRules
from paceline_executor.runner.device.row_words import RowWords, WordChanges
from paceline_executor.runner.device.steps import DeviceSteps, Rings, RowMasks, StepGraphs
from paceline_executor.runner.interface import (
    BoolArray,
    CacheGeometry,
    HostTokenLists,
    Int32Array,
    RowProblem,
    StepBatch,
    StepHandle,
    StepLogprobs,
    StepLostError,
    StepMasks,
    StepOutput,
    WarmUpProgress,
)
from paceline_executor.runner.measuring import fastest_ns, prompt
from paceline_executor.runner.prompt_logprobs import MAX_PIECE_TOKENS, Piece, by_row, pieces_of
from paceline_kernels.attention import Splits
from paceline_kernels.block_copy import block_copy
from paceline_kernels.plan_ring import PlanWriter, new_plan_ring, write_words
from paceline_kernels.result_ring import RingReader, StepResults, new_ring
from paceline_kernels.sampling import RuleTable, SampleOutcome, token_logprobs
from paceline_kernels.step_inputs import PlanColumns

T = TypeVar("T")

_MAX_IN_FLIGHT = 2  # they hide what the host does for as long as a step takes; three are no better
# The scheduler fits its prediction to these step times.
_MEASURED_TOKENS = (1, 16, 64, 256, 1024, 2048)
_LONG_NS = 250_000_000  # larger steps than one of these are not measured: a start would wait for them
_WORDS_PER_ROW = 192  # a new row's columns, end tokens and first blocks


@dataclass(frozen=True, slots=True)
class _LaunchedPiece:
    """In host memory once the step has ended."""

    row: int  # of the batch
    values: list[torch.Tensor] = field(default_factory=list)  # chosen, alternatives, theirs


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    step: int
    batch: StepBatch
    planned: Int32Array  # [num_planned] batch rows that the ring tells of
    with_logprobs: bool
    pieces: Sequence[_LaunchedPiece]
    graphs: StepGraphs
    rules: RuleTable | None


class DeviceRunner:
    """See `runner.interface.Runner`."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        kv_cache: KvCache,
        geometry: CacheGeometry,
        limits: RowLimits,
        *,
        buckets: Buckets,
        splits: Splits = Splits.EVEN,
        drafting: MakeDrafting | None = None,
        on_progress: Callable[[WarmUpProgress], None] = lambda _: None,
    ) -> None:
        """Takes the memory of rows and rings. drafting: None is prompt lookup, where limits allow drafts. on_progress
        is called during `warm_up`. Raises StartError for more rows than can be kept.
        """
        num_rows = limits.num_rows
        max_words = limits.max_num_batched_tokens + num_rows * _WORDS_PER_ROW
        max_logprobs = min(MAX_LOGPROBS, limits.vocab_size)
        plans = new_plan_ring(_MAX_IN_FLIGHT, num_rows, max_words, pinned=device.is_pinned)
        num_draws = limits.max_draws
        results = new_ring(_MAX_IN_FLIGHT, num_rows, num_draws, pinned=device.is_pinned, max_logprobs=max_logprobs)
        self._device = device
        self._model = model
        self._kv_cache = kv_cache
        self._geometry = geometry
        self._limits = limits
        self._buckets = buckets
        self._on_progress = on_progress
        self._rows = RowWords(limits, device.torch_device)
        self._rules = KeptRules(num_rows, device.upload)
        self._writer = PlanWriter(plans)
        self._reader = RingReader(results)
        rings = Rings(plans, results, max_logprobs)
        drafts = (drafting or lookups(limits))(device, self._rows)
        columns = self._rows, rings, geometry.block_size, splits
        self._steps = DeviceSteps(device, model, kv_cache, *columns, drafts)
        self._next_step = 0
        self._failed = np.zeros(num_rows, dtype=np.bool_)  # rows whose prompt was no number: the device goes on
        self._failing: dict[int, RowProblem] = {}

    @property
    def kv_geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def max_in_flight(self) -> int:
        return _MAX_IN_FLIGHT

    @property
    def profiler(self) -> Profiler:
        return self._device.profiler

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        self.capture()
        return self.measure(lambda batch: self.wait(self.launch(batch)))

    def capture(self) -> None:
        """The first part of a warm-up."""
        for index, bucket in enumerate(self._steps.capture(self._buckets)):
            self._tell(f"capture {bucket.num_tokens} tokens of {bucket.num_rows} rows", index)
        self._next_step = self._steps.num_steps

    def measure(self, run: Callable[[StepBatch], StepOutput]) -> tuple[tuple[int, int], ...]:
        """The second, whose steps go through `run`."""
        points: list[tuple[int, int]] = []
        for index, size in enumerate(self._measured_sizes, start=len(list(self._buckets))):
            self._tell(f"measure a step of {size} tokens", index)
            batch = prompt(np.zeros(size, dtype=np.int32), self._geometry.block_size)
            points.append((size, fastest_ns(partial(run, batch))))
            if len(points) > 1 and points[-1][1] > _LONG_NS:
                break
        return tuple(points)

    @property
    def _measured_sizes(self) -> list[int]:
        limits = self._limits
        most = min(limits.max_model_len, limits.max_num_batched_tokens, limits.num_blocks * limits.block_size)
        return [size for size in _MEASURED_TOKENS if size <= most]

    def _tell(self, step: str, index: int) -> None:
        num_steps = len(list(self._buckets)) + len(self._measured_sizes)
        self._on_progress(WarmUpProgress(step, index, num_steps))

    def launch(self, batch: StepBatch) -> StepHandle:
        """Raises MemoryError and RuntimeError where the device has no memory left."""
        described = batch.described
        changes = self._rows.changes(batch)
        self._rules.tell(described)
        self._steps.drafting.tell(described.rows)
        self._failed[described.rows] = False
        for row in described.rows.tolist():
            self._failing.pop(row, None)
        try:
            launched = self._launch(batch, changes)
        except Exception:
            self._end_launched()  # it reads the slot that the next step gets
            raise
        self._next_step += 1
        return launched

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        launched = _launched(handle)
        if launched.batch.num_drafts is None or not launched.batch.num_drafts.any():
            return None
        try:
            self._device.wait_until(lambda: self._steps.told.is_of(launched.step))
        except StepLostError:
            return None  # whoever waits for the step is told
        except Exception:
            self._end_launched()
            raise
        return self._steps.told.lists

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        launched, on_device = _launched(handle), None
        try:
            if masks is not None and masks.rows.size:
                upload, before_output = self._device.upload, masks.before_output(self._limits.num_rows + 1)
                on_device = RowMasks(upload(masks.words), upload(before_output))
            with_logprobs, rules = launched.with_logprobs, launched.rules
            self._steps.draw(launched.graphs, with_logprobs=with_logprobs, rules=rules, masks=on_device)
        except Exception:
            self._end_launched()
            self._next_step -= 1  # the device has not counted it
            raise

    def is_done(self, handle: StepHandle) -> bool:
        self._device.poll()
        return self._reader.has_step(_launched(handle).step)

    def wait(self, handle: StepHandle) -> StepOutput:
        launched = _launched(handle)
        try:
            self._device.wait_until(lambda: self._reader.has_step(launched.step))
        except StepLostError:
            if launched.step + 1 == self._next_step:
                self._device.recover()
                self._steps.count_from(self._next_step)
            raise
        results = self._reader.results_of(launched.step, launched.planned.size)
        if self._device.profiler.is_on:
            self._count_bytes(launched.batch)
            begun, forwarded, _, ended = results.stamps.tolist()
            self._device.profiler.add_times(begun, forwarded, ended)
        pieces = ((piece.row, StepLogprobs(*(values.numpy() for values in piece.values))) for piece in launched.pieces)
        prompt_logprobs, problems = by_row(pieces)
        self._failed[launched.batch.rows[list(problems)]] = True
        return self._output(launched, results, prompt_logprobs, problems)

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """It runs in order with the steps."""
        pairs = self._device.upload(sources), self._device.upload(destinations)
        tensors = (*self._kv_cache.of_blocks, *self._steps.drafting.block_tensors)

        def copy() -> None:
            try:
                for tensor in tensors:
                    block_copy(tensor, *pairs)
            except Exception as error:  # no step need come behind it that could fail instead
                raise DeviceFaultError(DEVICE_FAILED) from error

        try:
            self._device.launch(copy)
        except Exception:
            self._end_launched()
            raise

    def over_logits(self, token_ids: Int32Array, take: Callable[[slice, torch.Tensor], T]) -> list[T]:
        """Computes a text alone, on row 0 and the first blocks, as prompts are whose log-probabilities are wanted.

        take: gets the places of a few tokens and the logits behind each, [num_tokens, vocab], on the device, while they
        are computed; the next call overwrites them. Raises as `wait` does.
        """
        found: list[T] = []
        self._send(self._rows.changes(prompt(token_ids, self._geometry.block_size)))
        for start in range(0, token_ids.size, MAX_PIECE_TOKENS):
            places = slice(start, min(start + MAX_PIECE_TOKENS, token_ids.size))

            def add(logits: torch.Tensor, places: slice = places) -> None:
                found.append(take(places, logits))

            self._launch_logits(0, start, places.stop - start, add)
        self._device.synchronize()
        return found

    def _end_launched(self) -> None:
        """Raises DeviceFaultError where no launch can follow."""
        try:
            self._device.synchronize()
        except StepLostError:
            return  # those in flight say so
        except Exception as error:
            raise DeviceFaultError(DEVICE_FAILED) from error

    def _count_bytes(self, batch: StepBatch) -> None:
        """Rows that the device has ended are counted, too: this step they were planned."""
        geometry, profiler = self._geometry, self._device.profiler
        per_token = geometry.bytes_per_block // (geometry.block_size * geometry.num_layers)
        seen = context_bytes(batch.context_lens, batch.num_tokens, self._model.windows, per_token)
        profiler.add_bytes(LINEAR, self._model.weight_bytes)
        profiler.add_bytes(ATTENTION, seen)

    def _launch(self, batch: StepBatch, changes: WordChanges) -> _Launched:
        targets, num_tokens = pieces_of(batch.prompt_targets), batch.num_tokens.copy()
        in_slot = 0 if targets else min(changes.places.size, self._writer.max_words)
        self._send(WordChanges(changes.places[in_slot:], changes.values[in_slot:]))
        pieces = [self._launch_piece(piece, batch) for piece in targets]
        if batch.prompt_targets is not None:
            num_tokens[batch.prompt_targets.rows] -= batch.prompt_targets.num_tokens
        planned = np.flatnonzero(num_tokens).astype(np.int32)
        num_tokens, drawing = num_tokens[planned], batch.rows[batch.sampled]
        words = changes.places[:in_slot], changes.values[:in_slot]
        self._writer.write(self._next_step, batch.rows[planned], num_tokens, *words)
        with_logprobs = bool(self._rows.num_logprobs[drawing].max(initial=-1) >= 0)
        with self._device.profiler.span("rules"):
            rules = self._rules.of(drawing.tolist())
        num_draws = batch.sampled.size + (0 if batch.num_drafts is None else int(batch.num_drafts.sum()))
        tell = partial(self._steps.told.launch, batch) if batch.is_masked else None
        graphs = self._steps.launch(self._size(num_tokens, num_draws), rules, _wanted(batch), tell)
        launched = _Launched(self._next_step, batch, planned, with_logprobs, pieces, graphs, rules)
        if not batch.is_masked:
            self._steps.draw(graphs, with_logprobs=with_logprobs, rules=rules)
        return launched

    def _size(self, num_tokens: Int32Array, num_draws: int) -> Bucket:
        """num_tokens: of each row."""
        total, longest = int(num_tokens.sum()), int(num_tokens.max(initial=1))
        own = Bucket(max(1, num_tokens.size), max(1, total), longest, max(1, num_draws))
        return self._buckets.smallest(own) or replace(own, max_query_len=1 if own.is_decode else None)

    def _send(self, changes: WordChanges) -> None:
        """By a launch of its own: the words are more than a slot holds, or must come before the step."""
        if changes.places.size:
            places, values = self._device.upload(changes.places), self._device.upload(changes.values)
            self._device.launch(lambda: write_words(self._rows.words, places, values))

    def _launch_piece(self, piece: Piece, batch: StepBatch) -> _LaunchedPiece:
        """Computes the log-probabilities of the tokens behind, too."""
        upload, download, num_tokens = self._device.upload, self._device.download, piece.stop - piece.start
        row, start = int(batch.rows[piece.row]), int(batch.context_lens[piece.row] - batch.num_tokens[piece.row])
        targets = upload(np.array(piece.target_token_ids, dtype=np.int32))
        num_top = upload(np.full(num_tokens, piece.num_top, dtype=np.int32))
        launched = _LaunchedPiece(piece.row)

        def take(logits: torch.Tensor) -> None:
            vocabulary, max_logprobs = self._model.vocabulary, piece.num_top
            found = token_logprobs(logits, targets, num_top, max_logprobs=max_logprobs, vocabulary=vocabulary)
            columns = (found.logprobs, found.top_token_ids, found.top_logprobs)
            launched.values.extend(download(column) for column in columns)

        self._launch_logits(row, start + piece.start, num_tokens, take)
        return launched

    def _launch_logits(self, row: int, start: int, num_tokens: int, take: Callable[[torch.Tensor], object]) -> None:
        """Computes the row's tokens from `start` on, and hands over the logits behind them."""
        upload = self._device.upload
        plan = PlanColumns(upload(np.array([row], np.int32)), upload(np.array([num_tokens], np.int32)))
        self._device.launch(lambda: take(self._steps.logits_of(plan, num_tokens)))
        self._send(self._rows.computed(row, start + num_tokens))

    def _output(
        self,
        launched: _Launched,
        results: StepResults,
        prompt_logprobs: dict[int, StepLogprobs],
        problems: dict[int, RowProblem],
    ) -> StepOutput:
        """In arrays of their own: the slot is written again."""
        counts, is_kept = results.num_accepted, None
        failed = self._failed[launched.batch.rows[launched.planned]]
        if failed.any():
            is_kept = np.repeat(~failed, counts)
            counts = np.where(failed, 0, counts)
        self._add_problems(launched, results, problems)
        sampled, (of_batch, draws) = launched.batch.sampled, np.zeros((2, launched.batch.rows.size), dtype=np.int32)
        of_batch[launched.planned], draws[launched.planned] = counts, results.num_draws
        begun, forwarded, drafted, ended = results.stamps.tolist()
        draft_ns = max(0, drafted - begun)  # the stamp may be of an earlier step
        return StepOutput(
            num_accepted=of_batch[sampled],
            token_ids=_kept(results.token_ids, is_kept),
            logprobs=_logprobs(results, is_kept) if launched.with_logprobs else None,
            problems=problems,
            forward_ns=forwarded - begun - draft_ns,
            sample_ns=ended - forwarded,
            prompt_logprobs=prompt_logprobs,
            num_verified=np.maximum(draws[sampled] - 1, 0),
            draft_ns=draft_ns,
        )

    def _add_problems(self, launched: _Launched, results: StepResults, problems: dict[int, RowProblem]) -> None:
        """Behind tokens of the same step a row fails with its next one, as without drafts."""
        for planned in np.flatnonzero(results.problems).tolist():
            batch_row, problem = int(launched.planned[planned]), _problem_of(int(results.problems[planned]))
            if results.num_accepted[planned]:
                self._failing[int(launched.batch.rows[batch_row])] = problem
            else:
                problems.setdefault(batch_row, problem)
        if self._failing:
            for batch_row in launched.batch.sampled.tolist():
                row = int(launched.batch.rows[batch_row])
                if row in self._failing and not results.num_draws[launched.planned == batch_row].any():
                    problems.setdefault(batch_row, self._failing.pop(row))


def _problem_of(outcome: int) -> RowProblem:
    """`outcome` is a SampleOutcome other than DRAWN."""
    return RowProblem[SampleOutcome(outcome).name]


def _wanted(batch: StepBatch) -> WantedDrafts | None:
    if batch.num_drafts is None or not batch.num_drafts.any():
        return None
    wanting = np.flatnonzero(batch.num_drafts)
    of_batch, num_wanted = batch.sampled[wanting], batch.num_drafts[wanting]
    num_known = batch.context_lens[of_batch] - num_wanted
    return WantedDrafts(batch.rows[of_batch], num_known, num_wanted, batch.draft_spare_ns)


def _launched(handle: StepHandle) -> _Launched:
    if not isinstance(handle, _Launched):
        raise TypeError(f"a step is waited for by the handle of its launch, not by {handle!r}")
    return handle


def _kept(tokens: Int32Array, is_kept: BoolArray | None) -> Int32Array:
    return tokens.copy() if is_kept is None else tokens[is_kept]


def _logprobs(results: StepResults, is_kept: BoolArray | None) -> StepLogprobs:
    values = StepLogprobs(results.logprobs.copy(), results.top_token_ids.copy(), results.top_logprobs.copy())
    return values if is_kept is None else values.where(is_kept)
