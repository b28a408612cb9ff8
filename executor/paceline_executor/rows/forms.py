"""Which tokens rows may draw whose output keeps to a form: grammars compiled by llguidance, and rows' places in them.

A mask is a function of form, output and tokenizer alone. What is kept here of a row is a cache of that, so whoever
places a row again need not know of it. Forms are compiled, and outputs so far replayed, in threads of their own, never
in the one that asks. Refuses to know devices and plans.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from paceline.forms.compiling import LIMITS
from paceline.forms.grammar import grammar_of
from paceline.plan.values import NewRequest
from paceline.process.metrics import Definition, Kind, Meter
from paceline.v1.sampling_pb2 import StructuredOutput
from paceline_executor.runner.cores import usable_cores
from paceline_executor.runner.interface import Int32Array, StepMasks
from paceline_executor.runner.row_rules import NO_TOKENS

_CACHE_BYTES = 64 * 1024 * 1024
_FORM_BYTES, _BYTES_PER_BYTE = 128 * 1024, 32  # of a compiled form, and of it for each byte of its text; estimates
_COMPILING_THREADS, _MAX_MASKING_THREADS = 2, 8
_MANY_ENDS = 256  # as many as there are rows
_FEW = 8  # masks that take less time than waking a thread for them
_ANY, _NONE = np.uint32(0xFFFFFFFF), np.uint32(0)

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
COUNTED = (
    Definition("executor_form_mask_seconds", Kind.HISTOGRAM, "Time that masks of a step took.", (), _SECONDS),
    Definition("executor_form_compile_seconds", Kind.HISTOGRAM, "Time that compiling a form took.", (), _SECONDS),
    Definition("executor_failed_forms_total", Kind.COUNTER, "Requests whose form took more than a step may."),
    Definition("executor_waiting_forms_total", Kind.COUNTER, "Draws that waited until a form was compiled."),
    Definition("executor_forced_draft_tokens_total", Kind.COUNTER, "Drafts that forms told."),
)

_Words = npt.NDArray[np.uint32]
_log = structlog.get_logger()


class FormFailedError(Exception):
    """The form cannot be followed, by llguidance's own word for why. It has nothing of a request's text."""


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The tokens that end a row, as bits of a mask, beside those that its form's tokenizer takes for ends."""

    places: Int32Array  # [num_words] of a mask, ascending
    known: _Words  # [num_words] bits of all of them
    own: _Words  # [num_words] bits of those that end the row
    of_model: int  # the word of one that its tokenizer knows
    model_bit: np.uint32

    @staticmethod
    @lru_cache(maxsize=_MANY_ENDS)
    def of(own: tuple[int, ...], ignored: tuple[int, ...], model_ends: tuple[int, ...]) -> "Ends":
        """One for all rows with these, so that they are set together."""
        known = np.array((*own, *ignored, *model_ends), dtype=np.int32)
        places = np.unique(known // 32)
        of_model, model_bit = int(np.searchsorted(places, model_ends[0] // 32)), np.uint32(1 << model_ends[0] % 32)
        own_bits = _bits(places, np.array(own, dtype=np.int32))
        return Ends(places, _bits(places, known), own_bits, of_model, model_bit)


def _bits(places: Int32Array, token_ids: Int32Array) -> _Words:
    words = np.zeros(places.size, dtype=np.uint32)
    bits = np.uint32(1) << (token_ids % 32).astype(np.uint32)
    np.bitwise_or.at(words, np.searchsorted(places, token_ids // 32), bits)
    return words


class RowForm:
    """Where a row is in its form: what its matcher has consumed is compared with the row's output, and not trusted."""

    def __init__(self, placement: NewRequest, ends: Ends, compiled: Future[LLMatcher], pool: Executor) -> None:
        self.structured = placement.structured
        self.ends = ends
        self.min_tokens = placement.min_tokens
        self.is_fragile = False
        self._pool = pool
        self._fresh_at = -1  # tokens of the output for which its matcher was compiled
        self._matcher: LLMatcher | None = None
        self._compiled = compiled
        self._consumed = b""
        self._begin_at(placement.output_token_ids, compiled)

    @property
    def digest(self) -> str:
        """For log lines."""
        return hashlib.sha256(self.structured).hexdigest()[:16]

    @property
    def is_ready(self) -> bool:
        return self._matcher is not None or self.replayed.done()

    def at(self, output: Int32Array) -> LLMatcher:
        """Behind this output; what is done with it has to be taken back. Raises FormFailedError."""
        matcher, held = self._matcher or self.replayed.result(), output.tobytes()
        if held.startswith(self._consumed):
            _consume(matcher, output[len(self._consumed) // output.itemsize :].tolist())
        else:
            matcher = _replay(self._compiled, output)
        self._matcher, self._consumed = matcher, held
        return matcher

    def forced_at(self, output: Int32Array) -> Int32Array:
        """How the output goes on, as far as the form leaves no choice; its text may be made of other tokens, too."""
        if not self.is_ready or self.is_fragile:
            return NO_TOKENS
        try:
            return np.array(self.at(output).compute_ff_tokens(), dtype=np.int32)
        except Exception:
            return NO_TOKENS  # its next mask says so

    def has_failed_at(self, output: Int32Array) -> bool:
        """Of a matcher in error: so it would be anywhere."""
        return self._fresh_at == output.size or self._compiled.exception() is not None

    def begin_fresh(self, output: Int32Array, compiled: Future[LLMatcher]) -> None:
        """Copies share a lexer, which remembers what all of them met, its errors too."""
        self.is_fragile, self._fresh_at = True, output.size
        self._begin_at(output, compiled)

    def _begin_at(self, output: Int32Array, compiled: Future[LLMatcher]) -> None:
        self._compiled, self._matcher, self._consumed = compiled, None, output.tobytes()
        self.replayed = self._pool.submit(_replay, compiled, output.copy())


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRow:
    """It draws behind its output, and behind each of its drafts."""

    row: int
    form: RowForm
    output: Int32Array
    drafts: Int32Array

    @property
    def num_masks(self) -> int:
        return 1 + self.drafts.size


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """Rows that wait for their forms, and rows whose form failed, have masks without a token."""

    masks: StepMasks
    waiting: frozenset[int]
    failed: frozenset[int]


class FormMasker:
    """Those of a process. `begin` and `fill` are called from one thread."""

    def __init__(
        self, tokenizer_json: bytes, end_token_ids: Sequence[int], vocab_size: int, pool: Executor | None = None
    ) -> None:
        """end_token_ids: the model's, at least one. vocab_size: the model's; ids without a text are never drawn. pool:
        compiles and replays, by default in threads of its own.

        Costs nothing before the first form, with which the tokenizer is read.
        """
        self._tokenizer_json = tokenizer_json
        self._end_token_ids = tuple(end_token_ids)
        self._vocab_size = vocab_size
        self._pool = pool or ThreadPoolExecutor(_COMPILING_THREADS, "forms")
        self.meter = Meter(COUNTED)
        self._threads = LLExecutor(max(1, min(_MAX_MASKING_THREADS, usable_cores() // 2)))
        self._tokenizer: LLTokenizer | None = None
        self._marks: tuple[str, ...] = ()  # added tokens that are part of an output's text
        self._lock = Lock()
        self._compiled: OrderedDict[bytes, tuple[Future[LLMatcher], int]] = OrderedDict()  # with bytes; last used last
        self._num_bytes = 0

    def begin(self, placement: NewRequest) -> RowForm:
        """Returns at once; the form is compiled and the output so far replayed meanwhile."""
        compiled = self._compiled_form(placement.structured)
        ends = Ends.of(placement.end_token_ids, placement.ignored_end_token_ids, self._end_token_ids)
        return RowForm(placement, ends, compiled, self._pool)

    def fill(self, rows: Sequence[MaskedRow]) -> FilledMasks:
        """The masks of these rows, in their order."""
        start_ns = time.perf_counter_ns()
        starts = np.cumsum([0, *(each.num_masks for each in rows)], dtype=np.int32)
        words: _Words = np.zeros((starts[-1], -(-self._vocab_size // 32)), dtype=np.uint32)
        first = {each.row: start for each, start in zip(rows, starts[:-1].tolist(), strict=True)}
        ready = [each for each in rows if each.form.is_ready]  # asked once: it becomes so at any time
        stuck = self._fill_ready(ready, first, words)
        waiting, failed = {each.row for each in rows} - {each.row for each in ready}, set()
        for each in stuck:
            words[first[each.row] :][: each.num_masks] = _NONE
            if each.form.has_failed_at(each.output):
                _log.warning("form_failed", row=each.row, form=each.form.digest)
                failed.add(each.row)
            else:
                waiting.add(each.row)
                each.form.begin_fresh(each.output, self._pool.submit(self._compile, each.form.structured))
                self._forget(each.form.structured)
        _set_ends([each for each in ready if each not in stuck], first, words)
        self.meter.add("executor_failed_forms_total", len(failed))
        self.meter.add("executor_waiting_forms_total", len(waiting))
        self.meter.observe("executor_form_mask_seconds", (time.perf_counter_ns() - start_ns) / 1e9)
        masks = StepMasks(
            rows=np.array([each.row for each in rows], dtype=np.int32),
            offsets=np.array([each.output.size for each in rows], dtype=np.int32),
            starts=starts[:-1],
            words=words.view(np.int32),
        )
        return FilledMasks(masks, frozenset(waiting), frozenset(failed))

    def _compiled_form(self, structured: bytes) -> Future[LLMatcher]:
        digest = hashlib.sha256(structured).digest()
        if digest not in self._compiled:
            num_bytes = _FORM_BYTES + _BYTES_PER_BYTE * len(structured)
            self._compiled[digest] = self._pool.submit(self._compile, structured), num_bytes
            self._num_bytes += num_bytes
        self._compiled.move_to_end(digest)
        while self._num_bytes > _CACHE_BYTES and len(self._compiled) > 1:
            self._num_bytes -= self._compiled.popitem(last=False)[1][1]
        return self._compiled[digest][0]

    def _forget(self, structured: bytes) -> None:
        _, num_bytes = self._compiled.pop(hashlib.sha256(structured).digest(), (None, 0))
        self._num_bytes -= num_bytes

    def _compile(self, structured: bytes) -> LLMatcher:
        """With its first mask, which may take the longest of all. Raises FormFailedError."""
        start_ns = time.perf_counter_ns()
        with self._lock:
            if self._tokenizer is None:
                text, ends = self._tokenizer_json.decode(), list(self._end_token_ids)
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
                added = json.loads(text).get("added_tokens", ())
                self._marks = tuple(token["content"] for token in added if not token["special"])
        grammar = grammar_of(StructuredOutput.FromString(structured), self._marks)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
        with self._lock:
            self.meter.observe("executor_form_compile_seconds", (time.perf_counter_ns() - start_ns) / 1e9)
        _check(matcher)
        return matcher

    def _fill_ready(self, rows: Sequence[MaskedRow], first: Mapping[int, int], words: _Words) -> Sequence[MaskedRow]:
        """first: by row, in words. Returns the rows whose matcher is in error."""
        stuck, going = [], []
        for each in rows:
            if each.drafts.size:
                words[first[each.row] + 1 :][: each.drafts.size] = _ANY
            try:
                going.append((each, each.form.at(each.output)))
            except Exception:
                stuck.append(each)
        self._fill_words([(matcher, first[each.row], each.drafts.tolist()) for each, matcher in going], words)
        # Asked after every mask: that of a matcher in error is of the end tokens alone.
        return [*stuck, *(each for each, matcher in going if matcher.is_error())]

    def _fill_words(self, rows: Sequence[tuple[LLMatcher, int, list[int]]], words: _Words) -> None:
        """Behind a draft that a form refuses nothing is written: it is wrong, so nothing behind it counts."""
        num_masks, width = words.shape
        memory = words.ctypes.data, 4 * width, num_masks
        plain = [(matcher, mask) for matcher, mask, drafts in rows if not drafts]
        if len(plain) < _FEW:
            for matcher, mask in plain:
                matcher.unsafe_compute_mask_ptr(memory[0] + 4 * width * mask, 4 * width)
        else:
            self._threads.unsafe_compute_mask_ptr(plain, *memory)
        if drafting := [row for row in rows if row[2]]:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafting, *memory)


def _replay(compiled: Future[LLMatcher], output: Int32Array) -> LLMatcher:
    """Raises FormFailedError."""
    matcher = compiled.result().deep_copy()
    _consume(matcher, output.tolist())
    return matcher


def _consume(matcher: LLMatcher, token_ids: list[int]) -> None:
    """Raises FormFailedError."""
    if token_ids:
        matcher.consume_tokens(token_ids)
        _check(matcher)


def _check(matcher: LLMatcher) -> None:
    """Asked after every mask: that of a matcher in error is of the end tokens alone. Raises FormFailedError."""
    if matcher.is_error():
        raise FormFailedError(matcher.stop_reason())


def _set_ends(rows: Sequence[MaskedRow], first: Mapping[int, int], words: _Words) -> None:
    """Where a form is complete, all that ends the row may be drawn, else nothing of it. Below min_tokens it may be only
    where nothing else is left.
    """
    of_ends: dict[Ends, list[tuple[int, bool]]] = {}  # each mask, and whether it is below min_tokens
    for each in rows:
        num_early = each.form.min_tokens - each.output.size
        of_row = ((first[each.row] + number, number < num_early) for number in range(each.num_masks))
        of_ends.setdefault(each.form.ends, []).extend(of_row)
    for ends, these in of_ends.items():
        masks, is_early = np.array([mask for mask, _ in these]), np.array([early for _, early in these])
        cells = masks[:, None], ends.places
        before = words[cells]
        is_complete = (before[:, ends.of_model] & ends.model_bit) != 0
        words[cells] = others = before & ~ends.known
        if is_early.any():
            is_complete[is_early] &= ~words[masks[is_early]].any(axis=1)
        words[cells] = others | np.where(is_complete[:, None], ends.own, _NONE)
