"""Puts the runner of a GPU, or of its twin, together.

Apart from `loading_device`, which plans and loads what it is made of, and whose tests put another runner in its place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

from paceline.plan.values import GraphSizes
from paceline_executor.models.interface import KvCache
from paceline_executor.models.llama import LlamaModel
from paceline_executor.rows.limits import RowLimits
from paceline_executor.runner.cpu import WarmUpProgress
from paceline_executor.runner.interface import KvGeometry, Runner
from paceline_kernels.linear import Splits


class StepSize(Protocol):
    """A size that steps are captured in."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_decode(self) -> bool: ...


class StepSizes(Protocol):
    """All of them."""

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Of steps with a chunk, in tokens, ascending."""
        ...

    def __iter__(self) -> Iterator[StepSize]: ...


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is put together from."""

    is_twin: bool
    model: LlamaModel
    kv_cache: KvCache
    geometry: KvGeometry
    limits: RowLimits
    sizes: StepSizes
    splits: Splits
    on_progress: Callable[[WarmUpProgress], None]


def step_sizes(max_num_rows: int, max_num_tokens: int) -> StepSizes:
    """The sizes for a device with so many rows, of whose steps none has more tokens."""
    from paceline_executor.runner.buckets import buckets_of  # type: ignore[import-not-found]

    return cast("StepSizes", buckets_of(max_num_rows, max_num_tokens))


def graph_sizes(sizes: StepSizes) -> GraphSizes:
    """The same as schedulers are told of them."""
    return GraphSizes(tuple(sorted({size.num_rows for size in sizes if size.is_decode})), sizes.token_sizes)


def build_runner(parts: RunnerParts) -> Runner:
    """Take the memory of rows and rings. Raises StartError for more rows than a device can keep."""
    from paceline_executor.runner.cuda import DeviceRunner  # type: ignore[import-not-found]
    from paceline_executor.runner.device import CudaDevice  # type: ignore[import-not-found]
    from paceline_executor.runner.twin_device import TwinDevice  # type: ignore[import-not-found]

    device = TwinDevice() if parts.is_twin else CudaDevice()
    runner = DeviceRunner(
        device,
        parts.model,
        parts.kv_cache,
        parts.geometry,
        parts.limits,
        buckets=parts.sizes,
        splits=parts.splits,
        on_progress=parts.on_progress,
    )
    return cast("Runner", runner)
