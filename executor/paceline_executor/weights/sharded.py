"""One rank's part of a checkpoint: a checkpoint of fewer heads and a narrower feed-forward network.

Queries, keys, values, gates and ups are cut by rows, each head whole; the output of attention and downs by columns, so
that the ranks' products add up to the whole one's, whose biases stay whole. The output matrix is cut by tokens, unless
it is the embedding, too. Of a mixture a rank has some experts whole, or a part of each. All else every rank has,
routers included. A KV head that several ranks' queries need each of them has. Refuses to know how sums come about.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline_executor.errors import LimitError
from paceline_executor.weights.checkpoint import Checkpoint, Float32Array, KvScales, ModelConfig
from paceline_executor.weights.cuts import can_cut_inputs, can_cut_outputs, cut
from paceline_executor.weights.grouped_rows import GroupedRows, Matrix
from paceline_executor.weights.shares import shared_sizes, shares_whole_experts
from paceline_executor.weights.stored_checkpoint import as_float32, as_integers
from paceline_executor.weights.stored_tensor import StoredType

_KV = ("self_attn.k_proj", "self_attn.v_proj")
_BY_ROWS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
_TOKENS = 16  # the vocabulary is cut at multiples of so many
_BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
_EXPERT = re.compile(r"\.(experts\.\d+|shared_expert)\.")


def check_degree(whole: Checkpoint, degree: int) -> None:
    """Raises LimitError, with the degrees that are possible, for a number of ranks that cannot share the model."""
    problem = _problem(whole, degree)
    if not problem:
        return
    possible = [number for number in range(2, whole.config.num_heads + 1) if not _problem(whole, number)]
    are = f"{', '.join(map(str, possible))} {'are' if len(possible) > 1 else 'is'} possible"
    raise LimitError(f"--tensor-parallel-size {degree}: {problem}: {are if possible else 'leave it out'}")


def can_share(whole: Checkpoint, degree: int) -> bool:
    """Whether `check_degree` lets it pass."""
    return not _problem(whole, degree)


def _problem(whole: Checkpoint, degree: int) -> str:
    """Why so many ranks cannot share it; empty where they can."""
    config, stored_types = whole.config, whole.stored_types
    if degree == 1:
        return ""
    if config.qk_norm_spans_heads:
        return "queries and keys of all heads are normalised together"
    heads = f"{config.num_heads} attention heads and {config.num_kv_heads} KV heads"
    undivided = [words for words, size in shared_sizes(config).items() if size % degree]
    if undivided:
        return ", ".join((heads, *undivided))
    kv_fits = config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0
    if not kv_fits or config.num_heads % degree:
        return heads
    part = ShardedCheckpoint(whole, 0, degree)
    for name, shape in part.config.tensor_shapes().items():
        stored, size = stored_types.get(name), shape[-1]
        if _matrix(name, config) in _BY_COLUMNS and not can_cut_inputs(stored, size):
            return f"tensor {name} is {_format_of(stored)}, whose groups cannot be cut into parts of {size} inputs"
        if _matrix(name, config) in (*_BY_ROWS, *_KV) and not can_cut_outputs(stored, shape[0]):
            return f"tensor {name} is {_format_of(stored)}, whose words cannot be cut into parts of {shape[0]} outputs"
    return ""


def _matrix(name: str, config: ModelConfig) -> str:
    """Which of a layer it is, or its bias: that of an expert that ranks cut as that of a network for all tokens."""
    part = name.rsplit(".", 1)[0].split(".", 3)[-1]
    return part if ".experts." in part and shares_whole_experts(config) else _EXPERT.sub(".", part)


def _format_of(stored: StoredType | None) -> str:
    return "" if stored is None else stored.name


def scored_by(rank: int, degree: int, vocab_size: int) -> range:
    """The tokens whose logits a rank computes."""
    num_tiles = -(-vocab_size // _TOKENS)
    first, end = (min(vocab_size, num_tiles * each // degree * _TOKENS) for each in (rank, rank + 1))
    return range(first, end)


@dataclass(frozen=True, slots=True)
class ShardedCheckpoint:
    """See Checkpoint."""

    whole: Checkpoint
    rank: int
    degree: int  # that `check_degree` lets pass

    @property
    def config(self) -> ModelConfig:
        whole, experts = self.whole.config, self.whole.config.experts
        if experts is not None:
            shared_size = experts.shared_intermediate_size // self.degree
            experts = replace(experts, shared_intermediate_size=shared_size)
            if shares_whole_experts(whole):
                own = self._part(experts.routing.num_experts)
                experts = replace(experts, held=range(own.start, own.stop))
            else:
                experts = replace(experts, intermediate_size=experts.intermediate_size // self.degree)
        return replace(
            whole,
            experts=experts,
            whole=whole,
            num_heads=whole.num_heads // self.degree,
            num_kv_heads=max(1, whole.num_kv_heads // self.degree),
            intermediate_size=whole.intermediate_size // self.degree,
            scored=scored_by(self.rank, self.degree, whole.vocab_size),
        )

    @property
    def quantization(self) -> str:
        return self.whole.quantization

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return self.whole.stored_types

    @property
    def digest(self) -> str:
        return self.whole.digest

    @property
    def kv_scales(self) -> KvScales | None:
        scales = self.whole.kv_scales
        heads = self._part(self.whole.config.num_kv_heads)
        return None if scales is None else KvScales(scales.keys[:, heads], scales.values[:, heads])

    def stored(self, name: str) -> Matrix:
        whole = self.whole.stored(name)
        part, kind = _matrix(name, self.whole.config), name.rsplit(".", 1)[1]
        outputs, inputs = slice(0, whole.num_rows), slice(0, whole.row_numbers)
        if part == "lm_head":
            outputs = self.config.scored_rows
        elif part in _BY_COLUMNS and kind == "weight":
            inputs = self._part(whole.row_numbers)
        elif part in _BY_ROWS:
            outputs = self._part(whole.num_rows)
        elif part in _KV:
            heads, head_dim = self._part(self.whole.config.num_kv_heads), self.whole.config.head_dim
            outputs = slice(heads.start * head_dim, heads.stop * head_dim)
        else:
            return whole
        return cut(whole, outputs, inputs)

    def tensor(self, name: str) -> Float32Array:
        return as_float32(self.stored(name))

    def quantized(self, name: str) -> GroupedRows | None:
        return as_integers(self.stored(name))

    def _part(self, size: int) -> slice:
        """This rank's; of fewer than there are ranks, the one that it shares with its neighbours."""
        each = max(1, size // self.degree)
        start = self.rank * size // self.degree
        return slice(start, start + each)
