"""Random packed matrices for tests. Knows formats; it asserts nothing.

Apart from `decoders`, because products are tested without one.
"""

import numpy as np

from paceline_kernels.quantized_linear import PackedWeight, WeightFormat, pack_int4, pack_int8
from paceline_kernels.quantized_linear.packing import GROUP


def random_packed_weight(
    num_outputs: int, num_inputs: int, weight_format: WeightFormat, seed: int, span: int = 1
) -> PackedWeight:
    """A matrix of about unit gain, made of all integers of the format; no two spans have the same scale."""
    generator = np.random.default_rng([seed, num_outputs, num_inputs])
    spans = (num_outputs, -(-num_inputs // (GROUP * span)))
    if weight_format is WeightFormat.INT8:
        integers = generator.integers(-127, 128, (num_outputs, num_inputs)).astype(np.int8)
        scales = generator.uniform(0.5, 1.5, spans).astype(np.float32) / np.float32(73 * num_inputs**0.5)
        return pack_int8(integers, scales, span)
    nibbles = generator.integers(0, 16, (num_outputs, num_inputs), np.uint8)
    scales = generator.uniform(0.5, 1.5, spans).astype(np.float32) / np.float32(4.6 * num_inputs**0.5)
    if weight_format is WeightFormat.INT4_ZEROS:
        return pack_int4(nibbles, scales, zeros=generator.integers(0, 16, spans).astype(np.float32), span=span)
    return pack_int4(nibbles, scales, -scales * generator.uniform(6, 9, spans).astype(np.float32), span=span)
