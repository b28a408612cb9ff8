"""The head of EAGLE-3 against the paper's formulas in float64, and its files in both dialects."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import model_inputs
from model_inputs import Row
from paceline_executor.models.eagle3 import read_head
from paceline_executor.models.interface import KvCache
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from random_models import TINY_CONFIG
from random_models.eagle3 import Dialect, random_head

TARGET = replace(TINY_CONFIG, num_layers=4, vocab_size=100)
AUX_LAYERS = (2, 3, 1)
MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 64, 16, 12
DIALECTS = pytest.mark.parametrize("dialect", Dialect)
KINDS = {
    "as the authors have it": {"draft_vocab_size": 40},
    "an embedding of its own": {"has_embedding": True},
    "another hidden size": {"has_embedding": True, "hidden_size": 96, "draft_vocab_size": 33},
    "a normalised residual": {"norm_before_residual": True},
}


def target_embedding():
    """Of a hundred tokens."""
    return torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=torch.Generator().manual_seed(5))


def parts_of(kind):
    """What a folder of this kind of head contains."""
    options = dict(KINDS[kind])
    is_normalised = options.pop("norm_before_residual", False)
    parts = random_head(TARGET, aux_layers=AUX_LAYERS, **options)
    parts.fields["norm_before_residual"] = is_normalised
    return parts


def head_from(folder, kind=MatrixKind.DENSE):
    """As it is read, with the target's embedding where it has none."""
    table = target_embedding()
    return read_head(eagle3_from_folder(folder, TARGET), lambda token_ids: table[token_ids.long()], MAX_LEN, kind)


def computed_by(head, features, inputs, cache):
    """Features of the next positions, and logits, of the wanted tokens."""
    found, hidden = head.forward(features, inputs, cache)
    return found, head.logits(hidden, inputs.splits)


class Oracle:
    """The formulas, without a cache: all positions at once, in float64."""

    def __init__(self, parts):
        self.fields = parts.fields
        self.weights = {
            name.removesuffix(".weight"): torch.from_numpy(tensor).double()
            for name, tensor in parts.tensors.items()
            if tensor.dtype == np.float32
        }
        self.embedding = self.weights.get("embed_tokens", target_embedding().double())

    def norm(self, x, name):
        return x / (x.square().mean(dim=-1, keepdim=True) + self.fields["rms_norm_eps"]).sqrt() * self.weights[name]

    def heads(self, x, name):
        """[heads, tokens, head_dim]."""
        return (
            (x @ self.weights[f"midlayer.self_attn.{name}_proj"].T).unflatten(1, (-1, TARGET.head_dim)).transpose(0, 1)
        )

    def rotated(self, x):
        half = TARGET.head_dim // 2
        frequencies = self.fields["rope_theta"] ** (-torch.arange(half).double() / half)
        turns = torch.polar(torch.ones(1).double(), torch.arange(x.shape[1])[:, None] * frequencies)
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    def reduce(self, states):
        return states.double().flatten(1) @ self.weights["fc"].T

    def forward(self, features, token_ids):
        """Features of the next positions, and logits, of all positions."""
        normed = self.norm(features, "midlayer.hidden_norm")
        residual = normed if self.fields["norm_before_residual"] else features
        x = torch.cat((self.norm(self.embedding[token_ids], "midlayer.input_layernorm"), normed), dim=1)
        groups = TARGET.num_heads // TARGET.num_kv_heads
        keys, values = (
            part.repeat_interleave(groups, dim=0) for part in (self.rotated(self.heads(x, "k")), self.heads(x, "v"))
        )
        scores = self.rotated(self.heads(x, "q")) @ keys.transpose(1, 2) / math.sqrt(TARGET.head_dim)
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        attended = (scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1)
        stream = residual + attended @ self.weights["midlayer.self_attn.o_proj"].T
        x = self.norm(stream, "midlayer.post_attention_layernorm")
        gates, ups = (x @ self.weights[f"midlayer.mlp.{name}_proj"].T for name in ("gate", "up"))
        stream = stream + (torch.nn.functional.silu(gates) * ups) @ self.weights["midlayer.mlp.down_proj"].T
        return stream, self.norm(stream, "norm") @ self.weights["lm_head"].T


def new_cache():
    """Of the head alone, NaN wherever nothing was written."""
    shape = (NUM_BLOCKS, TARGET.num_kv_heads, BLOCK_SIZE, TARGET.head_dim)
    return KvCache(*(torch.full(shape, math.nan) for _ in "kv"))


def inputs_of(*parts):
    """Rows (blocks, token ids, start), each from position `start` on, and the last token of each row is wanted."""
    rows = (Row(tokens, blocks, start) for blocks, tokens, start in parts)
    return model_inputs.inputs_of(*rows, block_size=BLOCK_SIZE, only_last=True)


def states_of(length, seed):
    """Hidden states of a target, [length, layers, hidden]."""
    return torch.randn(length, len(AUX_LAYERS), TARGET.hidden_size, generator=torch.Generator().manual_seed(seed))


def tokens_of(length, seed):
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, length).tolist()


@DIALECTS
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(tmp_path, kind, dialect):
    parts = parts_of(kind)
    head, oracle, cache = head_from(parts.write(tmp_path / "head", dialect)), Oracle(parts), new_cache()
    blocks, lengths, chunks = ([7, 2, 11], [4, 0, 5]), (37, 20), ((0, 9), (9, 20))
    states, tokens = ([make(length, 10 + length) for length in lengths] for make in (states_of, tokens_of))
    features = [head.features(of_row) for of_row in states]
    for start, end in chunks:
        chunk = [(blocks[row], tokens[row][start:end], start) for row in range(2)]
        of_chunk = torch.cat([of_row[start:end] for of_row in features])
        found, logits = computed_by(head, of_chunk, inputs_of(*chunk), cache)
        assert_near(oracle, states, tokens, end, found, logits)
    found, logits = computed_by(head, features[0][20:], inputs_of((blocks[0], tokens[0][20:], 20)), cache)
    assert_near(oracle, states[:1], tokens[:1], 37, found, logits)
    known, following = oracle.reduce(states[0]), list(tokens[0])
    for token in (3, 99, 0, 50):
        at = len(following)
        following.append(token)
        known = torch.cat((known, oracle.forward(known, following[:-1])[0][-1:]))
        found, logits = computed_by(head, found, inputs_of((blocks[0], [token], at)), cache)
        expected_found, expected = oracle.forward(known, following)
        assert (found - expected_found[-1:]).abs().max() < 1e-4
        assert (logits - expected[-1:]).abs().max() < 1e-4


def assert_near(oracle, states, tokens, end, found, logits):
    """What each row's last position of so many gives."""
    for row, (of_row, following) in enumerate(zip(states, tokens, strict=True)):
        expected_found, expected = oracle.forward(oracle.reduce(of_row[:end]), following[:end])
        assert (found[row] - expected_found[-1]).abs().max() < 1e-4
        assert (logits[row] - expected[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_are_near_those_in_float32(tmp_path, kind):
    """Off by what int8 weights and activations cost, a few hundredths of the logits' spread on average."""
    folder = parts_of(kind).write(tmp_path / "head")
    inputs = inputs_of(*(([row], tokens_of(16, row), 0) for row in range(10)))
    exact, packed = (
        computed_by(head, head.features(states_of(160, 1)), inputs, new_cache())
        for head in (head_from(folder), head_from(folder, MatrixKind.PACKED))
    )
    for near, measure in zip(packed, exact, strict=True):
        assert 0 < (near - measure).square().mean().sqrt() < 0.05 * measure.std()


@pytest.mark.parametrize("kind", [MatrixKind.DENSE, MatrixKind.PACKED])
def test_chunks_and_company_change_no_bit(tmp_path, kind):
    """As in the target: what a row's last position gives does not depend on how it came to be computed."""
    head = head_from(parts_of("as the authors have it").write(tmp_path / "head"), kind)
    features, tokens = head.features(states_of(40, 1)), tokens_of(40, 1)
    alone = computed_by(head, features, inputs_of(([3, 1, 2], tokens, 0)), new_cache())
    cache, others = new_cache(), head.features(states_of(30, 2))
    for start, end in ((0, 1), (1, 30), (30, 40)):
        rows = inputs_of(([8, 9, 10], tokens_of(30, 2), 0), ([5, 0, 6], tokens[start:end], start))
        found = computed_by(head, torch.cat((others, features[start:end])), rows, cache)
    assert all(torch.equal(part[1:], expected) for part, expected in zip(found, alone, strict=True))


@DIALECTS
def test_the_id_map_leads_to_the_tokens_of_the_target(tmp_path, dialect):
    """d2t is what is to be added to an own id."""
    parts = parts_of("as the authors have it")
    checkpoint = eagle3_from_folder(parts.write(tmp_path / "head", dialect), TARGET)
    assert checkpoint.target_ids.tolist() == np.flatnonzero(parts.tensors["t2d"]).tolist()
    assert eagle3_from_folder(random_head(TARGET).write(tmp_path / "all", dialect), TARGET).target_ids is None
