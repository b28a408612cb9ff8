"""Puts the runner of a GPU, or of its twin, together.

Apart from `loading_device`, whose tests put another runner in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.plan.values import GraphSizes
from paceline_executor.limits import RowLimits
from paceline_executor.models.interface import KvCache
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.device.buckets import Buckets
from paceline_executor.runner.device.device import CudaDevice
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.interface import CacheGeometry, WarmUpProgress
from paceline_kernels.linear import Splits


@dataclass(frozen=True, slots=True)
class RunnerParts:
    is_twin: bool
    model: LlamaModel
    kv_cache: KvCache
    geometry: CacheGeometry
    limits: RowLimits
    sizes: Buckets
    splits: Splits
    drafting: MakeDrafting | None  # None: prompt lookup
    on_progress: Callable[[WarmUpProgress], None]


def graph_sizes(sizes: Buckets) -> GraphSizes:
    """As schedulers are told of them."""
    return GraphSizes(tuple(sorted({size.num_rows for size in sizes if size.is_decode})), sizes.token_sizes)


def build_runner(parts: RunnerParts) -> DeviceRunner:
    """Takes the memory of rows and rings. Raises StartError for more rows than a device can keep."""
    return DeviceRunner(
        TwinDevice() if parts.is_twin else CudaDevice(),
        parts.model,
        parts.kv_cache,
        parts.geometry,
        parts.limits,
        buckets=parts.sizes,
        splits=parts.splits,
        drafting=parts.drafting,
        on_progress=parts.on_progress,
    )
