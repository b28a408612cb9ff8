"""One rank's part of a checkpoint: a checkpoint of fewer heads and a narrower feed-forward network.

Queries, keys, values, gates and ups are cut by rows, each head whole; the output of attention and downs by columns, so
that the ranks' products add up to the whole one's, whose biases stay whole. The output matrix is cut by tokens, unless
it is the embedding, too. All else every rank has. A KV head that several ranks' queries need each of them has. Refuses
to know how sums come about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from paceline_executor.errors import LimitError, UnsupportedModelError
from paceline_executor.weights.checkpoint import Checkpoint, Float32Array, KvScales, ModelConfig
from paceline_executor.weights.grouped_rows import GroupedRows, Matrix
from paceline_executor.weights.stored_tensor import StoredType

_KV = ("self_attn.k_proj", "self_attn.v_proj")
_BY_ROWS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
_TOKENS = 16  # the vocabulary is cut at multiples of so many
_BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")


def check_degree(config: ModelConfig, degree: int) -> None:
    """Raises LimitError, with the degrees that are possible, for a number of ranks that cannot share the model."""
    if _is_possible(config, degree):
        return
    possible = [number for number in range(2, config.num_heads + 1) if _is_possible(config, number)]
    are = f"{', '.join(map(str, possible))} {'are' if len(possible) > 1 else 'is'} possible"
    whole = f"{config.num_heads} attention heads and {config.num_kv_heads} KV heads"
    if config.intermediate_size % degree:
        whole += f", gates and ups of {config.intermediate_size} outputs"
    raise LimitError(f"--tensor-parallel-size {degree}: {whole}: {are if possible else 'leave it out'}")


def _is_possible(config: ModelConfig, degree: int) -> bool:
    kv_fits = config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0
    return kv_fits and config.num_heads % degree == 0 and config.intermediate_size % degree == 0


@dataclass(frozen=True, slots=True)
class ShardedCheckpoint:
    """See Checkpoint. Read as floats: what is stored in groups would be cut within one."""

    whole: Checkpoint
    rank: int
    degree: int  # that `check_degree` lets pass

    @property
    def config(self) -> ModelConfig:
        whole = self.whole.config
        return replace(
            whole,
            num_heads=whole.num_heads // self.degree,
            num_kv_heads=max(1, whole.num_kv_heads // self.degree),
            intermediate_size=whole.intermediate_size // self.degree,
            scored=range(*(self._first_scored(rank) for rank in (self.rank, self.rank + 1))),
        )

    @property
    def quantization(self) -> str:
        return self.whole.quantization

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return {}

    @property
    def digest(self) -> str:
        return self.whole.digest

    @property
    def kv_scales(self) -> KvScales | None:
        scales = self.whole.kv_scales
        heads = self._part(self.whole.config.num_kv_heads)
        return None if scales is None else KvScales(scales.keys[:, heads], scales.values[:, heads])

    def stored(self, name: str) -> Matrix:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError(f"tensor {name} is one rank's, and has no bytes of its own: read it as floats")

    def tensor(self, name: str) -> Float32Array:
        tensor = self.whole.tensor(name)
        if name == "lm_head.weight":
            return tensor[self.config.scored_rows].copy()  # what it is a part of shall not stay
        part, kind = name.rsplit(".", 1)
        part = part.split(".", 3)[-1]
        if part in _BY_COLUMNS and kind == "weight":
            return np.ascontiguousarray(tensor[:, self._part(tensor.shape[1])])
        if part in _BY_ROWS:
            return tensor[self._part(tensor.shape[0])]
        if part in _KV:
            num_heads, head_dim = self.whole.config.num_kv_heads, self.whole.config.head_dim
            heads = self._part(num_heads)
            return tensor[heads.start * head_dim : heads.stop * head_dim]
        return tensor

    def quantized(self, name: str) -> GroupedRows | None:  # noqa: ARG002
        return None

    def _first_scored(self, rank: int) -> int:
        size = self.whole.config.vocab_size
        return min(size, -(-size // _TOKENS) * rank // self.degree * _TOKENS)

    def _part(self, size: int) -> slice:
        """This rank's; of fewer than there are ranks, the one that it shares with its neighbours."""
        each = max(1, size // self.degree)
        start = self.rank * size // self.degree
        return slice(start, start + each)
