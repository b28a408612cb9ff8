"""ModelOpt: float8 with a scale for all weights or each output, and NVFP4, also side by side.

Where keys and values alone are quantised, no algorithm is named.
"""

from paceline_executor.weights.grouped_rows import Matrix
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.float8 import float8_matrix
from paceline_executor.weights.hf.quantised.fp4 import modelopt_fp4_matrix
from paceline_executor.weights.hf.quantised.parts import Format, Parts
from paceline_executor.weights.refusals import shown, unsupported
from paceline_executor.weights.stored_tensor import StoredIntegers

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def modelopt_format(config: JsonFields) -> Format:
    """Raises ModelCorruptError or UnsupportedModelError."""
    algorithm = config.text("quant_algo")
    if algorithm is not None and algorithm.upper() not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise unsupported(config.path, f"its weights are modelopt {shown(algorithm)}; {known} are read")
    return _read_matrix


def _read_matrix(parts: Parts) -> Matrix:
    is_packed = isinstance(parts.tensors.get("weight"), StoredIntegers)
    return modelopt_fp4_matrix(parts) if is_packed else float8_matrix(parts, None)
