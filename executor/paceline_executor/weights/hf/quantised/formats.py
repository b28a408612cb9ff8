"""Which format a folder's matrices have: by its configuration, in the file of whatever tool wrote it, else by none."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from paceline_executor.weights.grouped_rows import Matrix
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.awq import awq_format, awq_type
from paceline_executor.weights.hf.quantised.bitsandbytes import bitsandbytes_matrix
from paceline_executor.weights.hf.quantised.compressed_tensors import compressed_tensors_format
from paceline_executor.weights.hf.quantised.float8 import float8_format, float8_matrix
from paceline_executor.weights.hf.quantised.gptq import Gptq
from paceline_executor.weights.hf.quantised.modelopt import modelopt_format
from paceline_executor.weights.hf.quantised.parts import Format, Parts
from paceline_executor.weights.refusals import shown, unsupported
from paceline_executor.weights.stored_tensor import GroupedType, StoredTensor

_KEYS = ("quantization_config", "compression_config")
OLDER_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Of AutoGPTQ, AutoAWQ and ModelOpt, beside a config.json without any of these keys."""
_FORMATS: Mapping[str, Callable[[JsonFields], Format]] = MappingProxyType(
    {
        "gptq": Gptq,
        "awq": awq_format,
        "compressed-tensors": compressed_tensors_format,
        "fp8": float8_format,
        "fbgemm_fp8": float8_format,
        "modelopt": modelopt_format,
        "bitsandbytes": lambda _: bitsandbytes_matrix,
    }
)
_TYPES: Mapping[str, Callable[[JsonFields], GroupedType]] = MappingProxyType(
    {"awq": awq_type, "gptq": lambda config: Gptq(config).type()}
)


def read_format(config: JsonFields) -> Format:
    """config: config.json. Raises ModelCorruptError, or UnsupportedModelError with the methods that are read."""
    found = _find(config)
    return _unexplained if found is None else _FORMATS[_method(found)](found)


def read_type(config: JsonFields) -> GroupedType | None:
    """That of every matrix, as far as the configuration alone says, scales in bfloat16; None where they are floats.

    Raises ModelCorruptError, or UnsupportedModelError where it says too little.
    """
    found = _find(config)
    if found is None:
        return None
    method = _method(found)
    if method not in _TYPES:
        reason = f"weights of {method} cannot be made without its files; those of {', '.join(_TYPES)} can"
        raise unsupported(found.path, f"{reason}, and floats without {_KEYS[0]}")
    return _TYPES[method](found)


def _method(found: JsonFields) -> str:
    if (method := found.text("quant_method")) is None:
        raise found.fault("quant_method", "missing")
    method = method.lower().replace("_tensors", "-tensors")  # tools write both
    packing = found.text("packing_format") or ""
    if method == "auto-round":  # it names the tool; the tensors are of one of the others
        method = next((known for known in ("gptq", "awq") if packing.endswith(f"auto_{known}")), method)
    if method not in _FORMATS:
        reason = f"its weights are quantised by {shown(method)}; floats are read, and what is quantised by"
        raise unsupported(found.path, f"{reason} {', '.join(_FORMATS)}")
    return method


def _unexplained(parts: Parts) -> Matrix:
    """Of float8 the tensors say all."""
    if isinstance(parts.tensors.get("weight"), StoredTensor):
        return float8_matrix(parts, None)
    where = " nor ".join(("config.json", *OLDER_FILES))
    raise unsupported(parts.path, f"{parts.module} is quantised, and neither {where} says how")


def _find(config: JsonFields) -> JsonFields | None:
    for fields in (config, config.object("text_config") or config.empty()):
        for key in _KEYS:
            if (found := fields.object(key)) is not None:
                return found
    gptq, awq, modelopt = (config.path.parent / name for name in OLDER_FILES)
    if gptq.exists():
        return JsonFields.read(gptq).with_defaults({"quant_method": "gptq"})
    if awq.exists():
        return JsonFields.read(awq).with_defaults({"quant_method": "awq"})
    if modelopt.exists():
        inner = JsonFields.read(modelopt).object("quantization") or config.empty()
        return inner.with_defaults({"quant_method": "modelopt"})
    return None
