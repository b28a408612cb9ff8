"""What an executor says about itself once its model is loaded. Knows values only."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline_executor.link.engine import Engine
from paceline_executor.rows.limits import RowLimits
from paceline_executor.runner.interface import KvGeometry
from paceline_executor.weights.tokenizer import TokenizerBundle


@dataclass(frozen=True, slots=True)
class Description:
    """A loaded model on a device."""

    model: str
    architecture: str
    num_parameters: int
    quantization: str  # empty when unquantised
    limits: RowLimits
    geometry: KvGeometry
    kv_dtype: str
    tokenizer: TokenizerBundle
    step_points: tuple[tuple[int, int], ...]  # (num_tokens, duration_ns), measured while warming up
    device: str
    num_threads: int  # 0 for a device that has none


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading gives: the engine for the step thread, the description for everyone."""

    engine: Engine
    description: Description


Load = Callable[[], Loaded]
