"""What the configuration of compressed-tensors says of matrices: a scheme for each of its `config_groups`.

Refuses to know tensors, and which modules a scheme is for: patterns in `targets` and `ignore` are not matched.
"""

from dataclasses import dataclass

from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.float8 import Block, read_block
from paceline_executor.weights.hf.quantised.gptq import group_size, read_bits
from paceline_executor.weights.refusals import shown, unsupported

_FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "dense"),
)

_INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True, slots=True)
class Scheme:
    bits: int  # 4 or 8
    is_float: bool
    group: int | None  # inputs; None for whole rows
    is_symmetric: bool  # then there are no zeros
    is_ordered: bool  # then neighbours do not share a group
    block: Block | None
    rounds_inputs: bool  # to int8, each token under a scale of its own, found when it is there

    def num_groups(self, num_inputs: int) -> int | None:
        """None where they do not divide the inputs."""
        size = min(self.group or num_inputs, num_inputs)
        return None if num_inputs % size else num_inputs // size


def read_schemes(config: JsonFields) -> frozenset[Scheme]:
    """Raises ModelCorruptError or UnsupportedModelError."""
    groups = (config.object("config_groups") or config.empty()).objects()
    for fields in (config, *groups):
        if (name := fields.text("format")) not in (None, *_FORMATS):
            known = ", ".join(_FORMATS)
            raise unsupported(config.path, f"its weights are compressed-tensors {shown(str(name))}; {known} are read")
    sparse = (config.object("sparsity_config") or config.empty()).text("format")
    if sparse not in (None, "dense"):
        raise unsupported(config.path, f"its weights are compressed-tensors {shown(sparse)}; dense ones are read")
    if (config.object("transform_config") or config.empty()).get("config_groups"):
        raise unsupported(config.path, "its transform_config multiplies the inputs of matrices with others")
    return frozenset(
        _read_scheme(weights, group.object("input_activations"))
        for group in groups
        if (weights := group.object("weights")) is not None
    )


def _read_scheme(weights: JsonFields, inputs: JsonFields | None) -> Scheme:
    return Scheme(
        bits=read_bits(weights, "num_bits", "compressed-tensors", (4, 8)),
        is_float=weights.text("type") == "float",
        group=group_size(weights) if weights.text("strategy") in (None, "group", "tensor_group") else None,
        is_symmetric=weights.flag("symmetric") is not False,
        is_ordered=weights.get("actorder") in ("group", "dynamic"),
        block=read_block(weights, "block_structure"),
        rounds_inputs=inputs is not None and all(inputs.get(name) == value for name, value in _INT8_TOKENS.items()),
    )
