"""Goes through everything that the steps of a device may launch, on tensors without numbers: nothing runs.

Knows what `runner` and `steps` launch, and calls the same code. It refuses to know why somebody watches.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity

from paceline_executor.limits import MAX_LOGPROBS, RowLimits
from paceline_executor.models.interface import DeviceModel, KvCache
from paceline_executor.profiling.torch_trace import TorchProfiler
from paceline_executor.runner.device.buckets import Bucket, Buckets
from paceline_executor.runner.device.device import Captured
from paceline_executor.runner.device.drafts import MakeDrafting, WantedDrafts, lookups
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.device.steps import DeviceSteps, Rings, RowMasks
from paceline_executor.runner.prompt_logprobs import MAX_PIECE_TOKENS
from paceline_kernels.attention import Splits
from paceline_kernels.block_copy import block_copy
from paceline_kernels.plan_ring import new_plan_ring, write_words
from paceline_kernels.result_ring import new_ring
from paceline_kernels.sampling import PENALTIES, RuleTable, TokenLists, token_logprobs
from paceline_kernels.step_inputs import PlanColumns

T = TypeVar("T")
_NUM_SLOTS = 2


class RehearsalDevice:
    is_pinned = False
    is_eager = False

    def __init__(self) -> None:
        self.torch_device = torch.device("meta")
        self.profiler = TorchProfiler((ProfilerActivity.CPU,))

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def guessing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        return _Rehearsed(work())

    def poll(self) -> None:
        return

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        assert is_there()

    def recover(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(values)).to(self.torch_device)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return values


@dataclass(frozen=True, slots=True)
class _Rehearsed(Generic[T]):
    outputs: T

    def replay(self) -> None:
        return


def rehearse(
    model: DeviceModel,
    kv_cache: KvCache,
    limits: RowLimits,
    buckets: Buckets,
    splits: Splits,
    make_drafting: MakeDrafting | None = None,
) -> None:
    """Launch what `DeviceRunner` does with these. model, kv_cache: on the device `meta`."""
    device, num_rows = RehearsalDevice(), limits.num_rows
    rows = RowWords(limits, device.torch_device)
    max_logprobs = min(MAX_LOGPROBS, limits.vocab_size)
    max_words = limits.max_num_batched_tokens
    drafting = (make_drafting or lookups(limits))(device, rows)
    rings = Rings(
        new_plan_ring(_NUM_SLOTS, num_rows, max_words, pinned=False),
        new_ring(_NUM_SLOTS, num_rows, limits.max_draws, pinned=False, max_logprobs=max_logprobs),
        max_logprobs,
    )
    steps = DeviceSteps(device, model, kv_cache, rows, rings, limits.block_size, splits, drafting)
    rules, masks = _rules(num_rows), RowMasks(_ints(-(-limits.vocab_size // 32))[None], _ints(num_rows + 1))
    for _ in steps.capture(buckets):
        pass
    for size in (*buckets, *_beyond(buckets, limits)):
        for with_logprobs in (False, True):
            for of_rows, of_forms in ((None, None), (rules, None), (None, masks), (rules, masks)):
                graphs = steps.launch(size, of_rows)
                steps.draw(graphs, with_logprobs=with_logprobs, rules=of_rows, masks=of_forms)
        for wanted in _wanted(limits) if drafting.max_drafts and not size.is_decode else ():
            for of_rows in (None, rules):
                steps.draw(steps.launch(size, of_rows, wanted), with_logprobs=False, rules=of_rows)
    for num_tokens in range(1, MAX_PIECE_TOKENS + 1):
        logits = steps.logits_of(PlanColumns(_ints(1), _ints(1)), num_tokens)
        for num_top in (0, 1):
            token_logprobs(logits, _ints(num_tokens), _ints(num_tokens), max_logprobs=num_top)
    write_words(rows.words, _ints(1), _ints(1))
    for tensor in (*kv_cache.of_blocks, *drafting.block_tensors):
        block_copy(tensor, _ints(1), _ints(1))


def _wanted(limits: RowLimits) -> Iterator[WantedDrafts]:
    """Of a row that a draft model is far behind, and of one that it is not."""
    row, most = np.zeros(1, dtype=np.int32), np.full(1, limits.max_num_draft_tokens, dtype=np.int32)
    yield WantedDrafts(row, row + limits.max_model_len, most)
    yield WantedDrafts(row, row + 1, most)


def _beyond(buckets: Buckets, limits: RowLimits) -> Iterator[Bucket]:
    num_tokens = limits.max_num_batched_tokens
    if num_tokens > max(size.num_tokens for size in buckets):
        for num_rows, num_draws in sorted({(size.num_rows, size.num_draws) for size in buckets}):
            yield Bucket(num_rows, num_tokens, None, num_draws)


def _rules(num_rows: int) -> RuleTable:
    lists = TokenLists(_ints(num_rows + 1), _ints(1))
    floats = torch.empty(num_rows, device="meta")
    return RuleTable(
        allowed=lists,
        biased=lists,
        biases=torch.empty(1, device="meta"),
        min_tokens=_ints(num_rows),
        withheld=lists,
        words=TokenLists(_ints(2), _ints(1)),
        cu_words=_ints(num_rows + 1),
        **dict.fromkeys(PENALTIES, floats),
    )


def _ints(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device="meta")
