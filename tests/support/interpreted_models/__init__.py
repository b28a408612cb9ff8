"""Models by the kernels of a GPU, interpreted, beside the CPU's in float32: a few steps of two rows.

float32 shows that nothing is left out or in the wrong place. float16 shows that types fit, and what rounding costs.
bfloat16 is what Triton's interpreter cannot compute. Needs Triton.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from model_inputs import Row, inputs_of
from paceline_executor.models.interface import ForwardInputs, KvCache, LanguageModel
from paceline_executor.models.registry import build_model, upload_model
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.weights import ModelConfig
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.stored_tensor import FloatType
from paceline_kernels.attention import Splits
from paceline_kernels.devices import cpu_stands_for_gpu
from random_models import FAMILY_CONFIGS, MIXTURE_CONFIGS

DEVICE = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 12, 64
_LENGTHS = (19, 12)  # tokens of two rows: one beyond the window, and in a second block
_WINDOW = 6
# Of logits, as a part of their spread, by the type that is computed with: on average (root mean square), and at most.
_TOLERANCES = {torch.float32: (2e-5, 1e-4), torch.float16: (4e-3, 5e-2)}
_FLOATS = {torch.float32: FloatType.FLOAT32, torch.float16: FloatType.FLOAT16}
CONFIGS = FAMILY_CONFIGS | MIXTURE_CONFIGS


def config_of(family: str) -> ModelConfig:
    """A window that few tokens leave: a program computes each token, and the interpreter takes milliseconds for it."""
    config = CONFIGS[family]
    return replace(config, sliding_window=_WINDOW) if config.sliding_window else config


def batch(
    parts: Sequence[tuple[int, int]],
    *,
    splits: Splits = Splits.EVEN,
    short_tokens: int = 1,
    max_query_len: int | None = None,
) -> ForwardInputs:
    """A batch in which row i computes the positions parts[i], its blocks in turn with the other's; all logits."""
    rows = [
        Row(_tokens_of(row)[start:stop], range(row, NUM_BLOCKS, len(parts)), start)
        for row, (start, stop) in enumerate(parts)
    ]
    inputs = inputs_of(*rows, block_size=BLOCK_SIZE)
    return replace(inputs, splits=splits, short_tokens=short_tokens, max_query_len=max_query_len)


def _tokens_of(row: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = torch.randint(3, 250, (_LENGTHS[row],), generator=torch.Generator().manual_seed(row)).tolist()
    return tokens


def two_steps(splits: Splits = Splits.EVEN) -> tuple[ForwardInputs, ForwardInputs]:
    """Two chunks, one beyond the window, then two decodes."""
    return batch([(0, 12), (0, 4)], splits=splits), batch([(12, 13), (4, 5)], splits=splits, max_query_len=1)


def all_steps() -> tuple[ForwardInputs, ...]:
    """Chunks, a decode beside a chunk, verified drafts beside a decode, chunks that read what is there."""
    return (
        batch([(0, 12), (0, 4)]),
        batch([(12, 13), (4, 9)]),
        batch([(13, 16), (9, 10)], short_tokens=4, max_query_len=4),
        batch([(16, 19), (10, 12)]),
    )


def _cache_of(config: ModelConfig, dtype: torch.dtype) -> KvCache:
    """An unwritten cache, with unwritten scales where it is of int8, and with 1/64 where it is of float8."""
    shape = (config.num_layers, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    keys_values = [torch.full(shape, 100 if dtype == torch.int8 else float("nan")).to(dtype) for _ in range(2)]
    if dtype == torch.int8:
        return KvCache(*keys_values, *(torch.full(shape[:-1], float("nan")) for _ in range(2)))
    if dtype == torch.float8_e4m3fn:
        return KvCache(*keys_values, *(torch.full((shape[0], shape[2]), 1 / 64) for _ in range(2)))
    return KvCache(*keys_values)


def logits_of(
    model: LanguageModel, config: ModelConfig, dtype: torch.dtype, batches: Sequence[ForwardInputs]
) -> torch.Tensor:
    """Those of all tokens of these steps."""
    cache = _cache_of(config, dtype)
    return torch.cat([model.forward(inputs, cache).clone() for inputs in batches])


def on_cpu(checkpoint: Checkpoint, batches: Sequence[ForwardInputs]) -> torch.Tensor:
    """What all others are compared with."""
    model = build_model(checkpoint, MAX_MODEL_LEN, MatrixKind.DENSE)
    return logits_of(model, checkpoint.config, torch.float32, batches)


def computed_in(dtype: torch.dtype, kind: MatrixKind = MatrixKind.DENSE) -> Numerics:
    return Numerics(kind, KvDtype.FLOAT32, _FLOATS[dtype])


def on_device(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    batches: Sequence[ForwardInputs],
    kind: MatrixKind = MatrixKind.AS_STORED,
    kv_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same by a GPU's kernels."""
    with cpu_stands_for_gpu():
        model = upload_model(checkpoint, DEVICE, MAX_MODEL_LEN, computed_in(dtype, kind))
        logits = logits_of(model, checkpoint.config, kv_dtype or dtype, batches)
    assert logits.dtype == dtype  # `sample` reads them as they are
    return logits.float()


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By how much of the spread of the logits each is off."""
    return (found - expected) / expected.std()


def average(errors: torch.Tensor) -> torch.Tensor:
    """Their root mean square."""
    return errors.square().mean().sqrt()


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Off by what rounding to this type costs."""
    off, (on_average, at_most) = errors(found, expected), _TOLERANCES[dtype]
    assert average(off) < on_average
    assert off.abs().max() < at_most
