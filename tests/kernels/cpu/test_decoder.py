"""decoder: a whole step against its reference, the same bits however tokens are grouped, and what misfits is refused.

As Llama has it, with everything that other families have besides, all at once, and with a mixture of experts.
"""

import dataclasses
import functools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.decoders import (
    HEAD_DIM,
    HIDDEN,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_POSITIONS,
    VOCAB,
    llama_weights,
    mixture_weights,
    mixtures,
    weights_with_everything,
)
from kernel_rig.packed import random_packed_weight
from kernel_rig.tensors import int32
from paceline_kernels.decoder import AuxHidden, Decoder, DecoderBatch, reference
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.quantized_linear import WeightFormat
from paceline_kernels.routing import Routing

NUM_BLOCKS, BLOCK_SIZE = 64, 16
WEIGHTS = llama_weights()
MIXTURE, MIXTURES = mixture_weights(Routing(7, 3), shared_width=64), mixtures()
BY_NAME = {"llama": WEIGHTS, "everything": weights_with_everything(), "mixture": MIXTURE}
DENSE = ("llama", "everything")
KINDS = pytest.mark.parametrize("weights", [BY_NAME[kind] for kind in DENSE], ids=DENSE)


@dataclasses.dataclass(frozen=True)
class Context:
    """One request's tokens, and the blocks that hold its keys and values."""

    token_ids: torch.Tensor
    blocks: torch.Tensor


def random_contexts(*lengths, seed=0):
    """Contexts of random tokens, their blocks scattered."""
    generator = torch.Generator().manual_seed(seed)
    free = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    contexts = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 + i)).int()
        blocks = [next(free) for _ in range(-(-length // BLOCK_SIZE))]
        contexts.append(Context(tokens, torch.tensor(blocks)))
    return contexts


def batch_of(*parts):
    """The batch that computes the tokens start:stop of each context, and the logits of all of them."""
    positions = [torch.arange(start, stop) for _, start, stop in parts]
    slots = [
        c.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for (c, _, _), at in zip(parts, positions, strict=True)
    ]
    tables = torch.full((len(parts), max(len(c.blocks) for c, _, _ in parts)), -1, dtype=torch.int32)
    for row, (context, _, _) in enumerate(parts):
        tables[row, : len(context.blocks)] = context.blocks
    ends = torch.tensor([0, *(len(at) for at in positions)]).cumsum(0)
    return DecoderBatch(
        token_ids=torch.cat([context.token_ids[start:stop] for context, start, stop in parts]),
        positions=torch.cat(positions).int(),
        slot_mapping=torch.cat(slots),
        cu_seqlens=ends.int(),
        context_lens=torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
        block_tables=tables,
        logit_tokens=torch.arange(int(ends[-1]), dtype=torch.int32),
    )


def new_caches(dtype):
    """Keys and values that are NaN, or have a scale of NaN, wherever nothing was written."""
    slot = HEAD_DIM + (4 if dtype == torch.int8 else 0)
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, slot)
    return [torch.full(shape, -1 if dtype == torch.int8 else float("nan"), dtype=dtype) for _ in range(2)]


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=["float16", "int8"])
slow = pytest.mark.slow


def compute(dtype, contexts, *steps, weights=WEIGHTS):
    """Copies of the logits of each step, computed into fresh caches. A step is (index, start, stop) for each row."""
    decoder, caches = Decoder(weights), new_caches(dtype)
    return [decoder.forward(batch_of(*((contexts[i], *cut) for i, *cut in step)), *caches).clone() for step in steps]


@pytest.mark.parametrize(
    ("dtype", "kind", "share"),
    [
        pytest.param(torch.float16, "llama", 0.9, id="float16-llama"),
        pytest.param(torch.float16, "everything", 0.5, id="float16-everything", marks=slow),
        pytest.param(torch.int8, "llama", 0.4, id="int8-llama", marks=slow),
        pytest.param(torch.int8, "everything", 0.25, id="int8-everything"),
        pytest.param(torch.float16, "mixture", 0.5, id="float16-mixture", marks=slow),
    ],
)
def test_steps_equal_the_reference(dtype, kind, share):
    """A prefill over several segments, then chunks, prefills and decodes together, then decodes alone.

    Both work on the same caches as they were before the step. The reference adds in float64: where it rounds to the
    same int8 everywhere, only float32's rounding is left, some 1e-6 of the logits' spread. Where a value lies so near
    the middle of two integers that the two round it apart, all that depends on it is off by about as much as rounding
    to int8 itself does, some hundredths of the spread, once in a while a seventh. That is rare: nine tokens of ten must
    be free of it. A norm after attention makes the small differences in an average of many values large again: there it
    is every second. Over int8 keys and values one of the many weights that are rounded is enough: there fewer tokens
    are free of it.
    """
    assert_steps_equal_the_reference(dtype, BY_NAME[kind], share)


@pytest.mark.parametrize("block_size", [48, pytest.param(80, marks=slow)])
def test_blocks_of_an_odd_number_of_vectors_equal_the_reference(block_size, monkeypatch):
    """Sixteen slots are one vector on some processors: of three or five the last has no other beside it."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCK_SIZE", block_size)
    assert_steps_equal_the_reference(torch.int8, WEIGHTS, share=0.4)


def assert_steps_equal_the_reference(dtype, weights, share):
    """See the first test that calls it; `share` of the tokens must be free of what is rounded apart."""
    long, short, late = random_contexts(301, 9, 71)
    decoder, caches, errors = Decoder(weights), new_caches(dtype), []
    for parts in (
        [(long, 0, 290), (short, 0, 7)],
        [(long, 290, 300), (short, 7, 8), (late, 0, 70)],
        [(long, 300, 301), (short, 8, 9), (late, 70, 71)],
    ):
        batch, expected_caches = batch_of(*parts), [cache.clone() for cache in caches]
        logits = decoder.forward(batch, *caches)
        expected = reference.forward(weights, batch, *expected_caches)
        errors.append((logits - expected).abs().amax(dim=1) / expected.std())
        for found, wanted in zip(caches, expected_caches, strict=True):
            assert_nearly_all_equal(found, wanted, batch.slot_mapping)
    assert torch.cat(errors).quantile(share) < 1e-5
    assert torch.cat(errors).max() < 0.2


def assert_nearly_all_equal(found, wanted, slot_mapping):
    """Blocks that the step did not write are as they were; of those written, a few bytes may be rounded apart."""
    differs = (found.view(torch.uint8) != wanted.view(torch.uint8)).transpose(0, 1)
    written = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
    written[slot_mapping // BLOCK_SIZE] = True
    assert not differs[~written].any()
    assert differs[written].float().mean() < 0.05


LENGTHS = (70, 33, 20)


@functools.cache
def at_once(dtype, kind):
    """The logits of three contexts, each computed alone in one step."""
    contexts = random_contexts(*LENGTHS)
    return [compute(dtype, contexts, [(i, 0, length)], weights=BY_NAME[kind])[0] for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((dtype, kind) for dtype in (torch.float16, torch.int8) for kind in DENSE),
        (torch.int8, "mixture"),
        pytest.param(torch.float16, "mixture", marks=slow),
    ],
)
@settings(max_examples=settings.default.max_examples // 5)
@given(
    cuts=st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 7, 16, 65])] * 3), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_however_tokens_are_grouped_into_steps_they_have_the_same_bits(dtype, kind, cuts, seed):
    """Three contexts cut at random, in each other's company, wherever their blocks lie: as each alone and at once.

    Some have no token in a step.
    """
    alone = at_once(dtype, kind)
    steps, done = [], [0, 0, 0]
    for counts in (*cuts, LENGTHS):
        ends = [min(at + count, length) for at, count, length in zip(done, counts, LENGTHS, strict=True)]
        steps.append([(i, at, end) for i, (at, end) in enumerate(zip(done, ends, strict=True))])
        done = ends
    steps = [step for step in steps if any(end > at for _, at, end in step)]
    found = compute(dtype, random_contexts(*LENGTHS, seed=seed), *steps, weights=BY_NAME[kind])
    for step, logits in zip(steps, found, strict=True):
        assert torch.equal(logits, torch.cat([alone[i][start:stop] for i, start, stop in step]))


@KINDS
@DTYPES
@pytest.mark.parametrize("chunk", [1, 64, 100])
def test_chunks_do_not_change_a_bit(dtype, chunk, weights):
    """Over more than one segment of attention: decodes then share their segments out."""
    contexts = random_contexts(270)
    steps = [[(0, start, min(start + chunk, 270))] for start in range(0, 270, chunk)]
    chunks = compute(dtype, random_contexts(270, seed=1), *steps, weights=weights)
    assert torch.equal(torch.cat(chunks), compute(dtype, contexts, [(0, 0, 270)], weights=weights)[0])


AUX_LAYERS = (3, 1)


def with_aux(weights, dtype, contexts, *steps):
    """The hidden states of each step, and its logits; what nobody writes is NaN."""
    decoder, caches, found = Decoder(weights), new_caches(dtype), []
    for step in steps:
        batch = batch_of(*((contexts[i], *cut) for i, *cut in step))
        batch = dataclasses.replace(batch, logit_tokens=batch.logit_tokens[-1:])
        aux = AuxHidden(AUX_LAYERS, torch.full((len(batch.token_ids), len(AUX_LAYERS), HIDDEN), float("nan")))
        found.append((aux.states, decoder.forward(batch, *caches, aux=aux).clone()))
    return found


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float16, "llama"),
        (torch.int8, "everything"),
        pytest.param(torch.float16, "everything", marks=slow),
        pytest.param(torch.int8, "llama", marks=slow),
    ],
)
def test_hidden_states_between_layers_are_those_of_the_reference(dtype, kind, monkeypatch):
    """In the order of the layers that are asked for, of tokens whose logits nobody wants too, the same bits in chunks.

    They cost the logits nothing. Off by what is rounded apart, see the first test.
    """
    monkeypatch.setattr(sys.modules[__name__], "NUM_LAYERS", 4)
    weights = dataclasses.replace(BY_NAME[kind], layers=BY_NAME[kind].layers * 2)
    contexts = random_contexts(70, 9)
    steps = [(0, 0, 68), (1, 0, 8)], [(0, 68, 70), (1, 8, 9)]
    (aux, logits), _ = with_aux(weights, dtype, contexts, *steps)
    batch = batch_of((contexts[0], 0, 68), (contexts[1], 0, 8))
    expected = AuxHidden(AUX_LAYERS, torch.full_like(aux, float("nan")))
    reference.forward(weights, batch, *new_caches(dtype), expected)
    errors = (aux - expected.states).abs().amax(dim=2) / expected.states.std()
    assert errors.max() < 0.1
    assert errors.median() < 0.02
    assert (expected.states[:, 0] - expected.states[:, 1]).abs().mean() > 10 * errors.mean()
    assert torch.equal(logits, compute(dtype, contexts, *steps[:1], weights=weights)[0][-1:])
    chunks = with_aux(weights, dtype, contexts, [(0, 0, 5)], [(1, 0, 8), (0, 5, 68)])
    assert torch.equal(torch.cat((chunks[0][0], chunks[1][0][8:], chunks[1][0][:8])), aux)


@KINDS
@DTYPES
def test_the_number_of_threads_does_not_change_a_bit(dtype, threads, weights):
    """Threads share pieces out, never a sum; folding falls to whichever is last."""
    contexts = random_contexts(300, 280, 70)
    steps = [[(0, 0, 299), (1, 0, 279)], [(0, 299, 300), (1, 279, 280), (2, 0, 70)]]
    one = compute(dtype, contexts, *steps, weights=weights)
    threads(2)
    two = compute(dtype, contexts, *steps, weights=weights)
    assert all(torch.equal(a, b) for a, b in zip(two, one, strict=True))


@KINDS
@DTYPES
def test_what_an_earlier_step_left_behind_is_never_read(dtype, weights):
    (context,) = random_contexts(60)
    batch, caches = batch_of((context, 0, 60)), new_caches(dtype)
    decoder = Decoder(weights)
    expected = decoder.forward(batch, *caches)
    for part in decoder._decoder._activations:
        part.fill(99 if part.dtype == "int8" else float("nan"))
    assert torch.equal(decoder.forward(batch, *new_caches(dtype)), expected)
    assert torch.equal(decoder.forward(batch_of((context, 0, 1)), *new_caches(dtype)), expected[:1])


@KINDS
@DTYPES
def test_the_last_layer_does_without_what_only_unwanted_logits_need(dtype, weights):
    """Of 300 tokens the last is wanted: for the others memory holds the layer before."""
    (context,) = random_contexts(300)
    batch, decoder = batch_of((context, 0, 300)), Decoder(weights)
    expected = decoder.forward(batch, *new_caches(dtype))[-1:]
    of_all = decoder._decoder._activations.fed_scales.copy()
    for part in decoder._decoder._activations:
        part.fill(99 if part.dtype == "int8" else float("nan"))
    last = dataclasses.replace(batch, logit_tokens=torch.tensor([299], dtype=torch.int32))
    assert torch.equal(decoder.forward(last, *new_caches(dtype)), expected)
    of_last = decoder._decoder._activations.fed_scales
    assert (of_last[299] == of_all[299]).all()
    assert (of_last[:256] != of_all[:256]).any(axis=1).all()


@KINDS
def test_logits_come_for_the_tokens_that_want_them(weights):
    """In the order in which they are named, and as often: more often than there are tokens, too."""
    (context,) = random_contexts(40)
    batch = batch_of((context, 0, 40))
    every = Decoder(weights).forward(batch, *new_caches(torch.float16))
    wanted = torch.tensor([39, 3, 17], dtype=torch.int32)
    chosen = dataclasses.replace(batch, logit_tokens=wanted)
    assert torch.equal(Decoder(weights).forward(chosen, *new_caches(torch.float16)), every[wanted.long()])
    often = torch.full((500,), 39, dtype=torch.int32)
    repeated = Decoder(weights).forward(dataclasses.replace(batch, logit_tokens=often), *new_caches(torch.float16))
    assert torch.equal(repeated, every[often.long()])
    none = dataclasses.replace(batch, logit_tokens=wanted[:0])
    assert Decoder(weights).forward(none, *new_caches(torch.float16)).shape == (0, VOCAB)


@KINDS
@DTYPES
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_a_few_tokens_are_those_of_all(dtype, seed, weights):
    """Beside decodes, in a chunk that is cut into pieces, most of which nobody wants; nor do keys and values change."""
    contexts = random_contexts(300, 200, 40)
    steps = [(0, 0, 299), (1, 0, 40)], [(0, 299, 300), (1, 40, 200), (2, 0, 40)]
    decoders, caches = (Decoder(weights), Decoder(weights)), (new_caches(dtype), new_caches(dtype))
    for number, step in enumerate(steps):
        batch = batch_of(*((contexts[i], *cut) for i, *cut in step))
        generator = torch.Generator().manual_seed(10 * seed + number)
        wanted = torch.randperm(len(batch.token_ids), generator=generator)[:seed].int()
        every = decoders[0].forward(batch, *caches[0])
        some = decoders[1].forward(dataclasses.replace(batch, logit_tokens=wanted), *caches[1])
        assert torch.equal(some, every[wanted.long()])
    assert all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(*caches, strict=True))


def test_the_embedding_may_serve_as_output_matrix():
    tied = dataclasses.replace(WEIGHTS, lm_head=WEIGHTS.embedding)
    (context,) = random_contexts(20)
    batch, expected_caches = batch_of((context, 0, 20)), new_caches(torch.float16)
    expected = reference.forward(tied, batch, *expected_caches)
    errors = (Decoder(tied).forward(batch, *new_caches(torch.float16)) - expected).abs().amax(dim=1)
    assert errors.quantile(0.5) < 1e-5 * expected.std()


@KINDS
def test_a_timed_step_says_when_each_phase_was_and_what_it_had_to_read(weights):
    """Phase behind phase. A layer that sees 50 positions reads those, and its matrices."""
    decoder, caches, (context,) = Decoder(weights), new_caches(torch.int8), random_contexts(70)
    decoder.forward(batch_of((context, 0, 70)), *caches)
    step = batch_of((context, 69, 70))
    times = []
    timed = decoder.forward(step, *caches, times=times).clone()
    reorder = ["reorder"] if weights.has_orders else []
    layer = ["qkv", "attention", *reorder, "attention_output", "norm", "gate_up", "down", "norm"]
    seen = [min(70, each.window or 70) for each in weights.layers]

    assert [one.phase for one in times] == ["embed", *layer * NUM_LAYERS, "logits"]
    assert [one.end_ns for one in times[:-1]] == [one.start_ns for one in times[1:]]
    assert [one.end_ns for one in times] == sorted(one.end_ns for one in times)
    assert [one.num_bytes for one in times if one.phase == "down"] == [
        each.down.data.numel() for each in weights.layers
    ]
    assert [one.num_bytes for one in times if one.phase == "attention"] == [2 * 36 * count for count in seen]
    assert torch.equal(timed, decoder.forward(step, *caches))


# Mixtures of experts


@pytest.mark.parametrize("weights", MIXTURES.values(), ids=MIXTURES.keys())
def test_mixtures_equal_the_reference(weights):
    """Of contexts so short that most tokens are free of what is rounded apart, see the first test."""
    contexts = random_contexts(*[2] * 30)
    batch, expected_caches = batch_of(*((each, 0, 2) for each in contexts)), new_caches(torch.int8)
    decoder = Decoder(weights)
    found, expected = (
        decoder.forward(batch, *new_caches(torch.int8)),
        reference.forward(weights, batch, *expected_caches),
    )
    errors = (found - expected).abs().amax(dim=1) / expected.std()
    assert errors.quantile(0.6) < 1e-5
    assert errors.quantile(0.9) < 0.1
    assert torch.equal(compute(torch.int8, contexts, [(7, 0, 2)], weights=weights)[0], found[14:16])


def test_more_tokens_than_a_block_of_slots_holds_have_the_bits_of_each_alone():
    """4,096 slots are 576 tokens of seven choices; units of them, too, are full and not."""
    weights = MIXTURES["all experts"]
    contexts = random_contexts(300, 330, 290)
    together = compute(torch.int8, contexts, [(0, 0, 300), (1, 0, 330), (2, 0, 290)], weights=weights)[0]
    alone = [
        compute(torch.int8, contexts, [(i, 0, length)], weights=weights)[0] for i, length in enumerate((300, 330, 290))
    ]
    assert torch.equal(together, torch.cat(alone))


def test_threads_share_a_mixture_without_changing_a_bit(threads):
    contexts = random_contexts(150, 280)
    steps = [[(0, 0, 149)], [(0, 149, 150), (1, 0, 279)], [(1, 279, 280)]]
    one = compute(torch.int8, contexts, *steps, weights=MIXTURE)
    threads(2)
    for _ in range(5):
        two = compute(torch.int8, contexts, *steps, weights=MIXTURE)
        assert all(torch.equal(a, b) for a, b in zip(two, one, strict=True))


def test_a_token_without_numbers_spoils_no_other():
    """Its row of the embedding has scales that are none; its experts are named, and its company has its own bits."""
    data = MIXTURE.embedding.data.clone()
    data[5 // 16, 2 * (5 % 16) : 2 * (5 % 16) + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a float16 NaN
    weights = dataclasses.replace(MIXTURE, embedding=dataclasses.replace(MIXTURE.embedding, data=data))
    sound, spoilt = random_contexts(30, 3)
    sound.token_ids[sound.token_ids == 5] = 6
    spoilt.token_ids[1] = 5
    together = compute(torch.int8, [sound, spoilt], [(1, 0, 3), (0, 0, 30)], weights=weights)[0]
    assert together[1].isnan().all()
    assert torch.equal(together[3:], compute(torch.int8, [sound], [(0, 0, 30)], weights=weights)[0])


def test_the_last_layer_routes_only_tokens_whose_logits_are_wanted():
    """Whatever memory holds; its experts are those of one token, which is what a timed step says it read."""
    (context,) = random_contexts(300)
    batch, decoder, times = batch_of((context, 0, 300)), Decoder(MIXTURE), []
    expected = decoder.forward(batch, *new_caches(torch.int8))[-1:]
    for part in (*decoder._decoder._activations, *decoder._decoder._mixture):
        if getattr(part, "dtype", None) in ("float32", "int8"):
            part.fill(99 if part.dtype == "int8" else float("nan"))
    last = dataclasses.replace(batch, logit_tokens=int32(299))
    assert torch.equal(decoder.forward(last, *new_caches(torch.int8), times=times), expected)
    assert sorted(decoder.tokens_of_experts(1, 300)) == [0] * 4 + [1] * 3
    layer = MIXTURE.layers[1]
    read = {one.phase: one.num_bytes for one in times if one.layer == 1}
    assert read["route"] == 4 * 7 * HIDDEN
    assert read["gate_up"] == layer.gate_up.num_bytes + layer.experts.gate_up.num_bytes * 3 // 7
    assert read["down"] == layer.down.num_bytes + layer.experts.down.num_bytes * 3 // 7


def test_experts_of_a_layer_get_the_tokens_of_all_blocks_of_slots():
    batch, decoder = batch_of(*((one, 0, 300) for one in random_contexts(300, 300))), Decoder(MIXTURES["all experts"])
    decoder.forward(batch, *new_caches(torch.int8))
    assert decoder.tokens_of_experts(1, 600).tolist() == [600] * 7


# What misfits is refused, with its name, before anything is written


LAYER = WEIGHTS.layers[0]


SOUND = {
    "token_ids": int32(5, 6),
    "positions": int32(0, 1),
    "slot_mapping": torch.tensor([48, 49]),
    "cu_seqlens": int32(0, 2),
    "context_lens": int32(2),
    "block_tables": int32(3)[None],
    "logit_tokens": int32(1),
}


def refused(match, keys=None, values=None, weights=WEIGHTS, aux=None, **changes):
    """The sound batch with these changes is refused, and nothing is written."""
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    fresh = [torch.full(shape, float("nan"), dtype=torch.float16) for _ in range(2)]
    caches = [fresh[0] if keys is None else keys, fresh[1] if values is None else values]
    with pytest.raises(KernelArgumentError, match=match):
        Decoder(weights).forward(DecoderBatch(**(SOUND | changes)), *caches, aux=aux)
    assert all(cache.isnan().all() for cache in fresh)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("token_ids", int32(5, VOCAB), "token ids must be 0 to 99"),
        ("token_ids", int32(-1, 5), "token ids must be 0 to 99"),
        ("positions", int32(0, NUM_POSITIONS), "positions must be 0 to 599"),
        ("positions", int32(-1, 0), "positions must be 0 to 599"),
        ("slot_mapping", torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE]), "slots must be 0 to 1023"),
        ("slot_mapping", torch.tensor([-1, 0]), "slots must be 0 to 1023"),
        ("logit_tokens", int32(2), "must be 0 to 1"),
        ("logit_tokens", int32(-1), "must be 0 to 1"),
        ("block_tables", int32(NUM_BLOCKS)[None], "row 0"),
        ("block_tables", int32(-1)[None], "row 0"),
        ("context_lens", int32(17), "row 0"),  # more than its blocks hold
        ("context_lens", int32(1), "row 0"),  # less than it computes
        ("cu_seqlens", int32(0, 1), "must run from 0 to 2"),
        ("cu_seqlens", int32(1, 2), "must run from 0 to 2"),
    ],
)
def test_an_index_that_names_nothing_is_refused(name, value, problem):
    """Compiled code never sees it."""
    refused(problem, **{name: value})


@pytest.mark.parametrize(
    ("layers", "states", "problem"),
    [
        ((0,), torch.zeros(2, 1, HIDDEN), "aux.layers must be 1 to 1, each once"),  # nothing flows between layers there
        ((NUM_LAYERS,), torch.zeros(2, 1, HIDDEN), "aux.layers must be 1 to 1"),
        ((1, 1), torch.zeros(2, 2, HIDDEN), "each once"),
        ((1,), torch.zeros(3, 1, HIDDEN), "aux.states must have shape"),
        ((1,), torch.zeros(2, 2, HIDDEN), "aux.states must have shape"),
        ((1,), torch.zeros(2, 1, HIDDEN).double(), "aux.states must be torch.float32"),
    ],
)
def test_hidden_states_without_a_place_are_refused(layers, states, problem):
    refused(problem, aux=AuxHidden(layers, states))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("token_ids", torch.tensor([5, 6]), "token_ids must be torch.int32"),
        ("token_ids", int32(5, 0, 6, 0)[::2], "token_ids must be contiguous"),
        ("positions", int32(0), "positions must have shape"),
        ("slot_mapping", int32(48, 49), "slot_mapping must be torch.int64"),
        ("cu_seqlens", int32(0, 1, 2), "cu_seqlens must have shape"),
        ("context_lens", torch.tensor([2]), "context_lens must be torch.int32"),
        ("block_tables", int32(3), "block_tables must have shape"),
        ("logit_tokens", int32(1)[None], "logit_tokens must have shape"),
        ("keys", torch.zeros(2, 64, 1, 16, 32), "keys must be float16 or int8, not torch.float32"),
        ("keys", torch.zeros(2, 64, 1, 16, 36, dtype=torch.int8), "values must be torch.int8"),
        ("keys", torch.zeros(2, 64, 1, 16, 32, dtype=torch.int8), "keys must have shape"),  # no room for scales
        ("keys", torch.zeros(3, 64, 1, 16, 32, dtype=torch.float16), "keys must have shape"),
        ("keys", torch.zeros(2, 64, 2, 16, 32, dtype=torch.float16), "keys must have shape"),
        ("values", torch.zeros(2, 63, 1, 16, 32, dtype=torch.float16), "values must have shape"),
        ("values", torch.zeros(2, 64, 1, 32, 16, dtype=torch.float16).transpose(3, 4), "values must be contiguous"),
    ],
)
def test_a_tensor_of_another_kind_is_refused(name, value, problem):
    refused(problem, **{name: value})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": (dataclasses.replace(LAYER, qkv=LAYER.down),)}, r"qkv has shape \[96, 64\]"),
        ({"layers": (dataclasses.replace(LAYER, attention_output=LAYER.qkv),)}, "attention_output has shape"),
        ({"layers": (dataclasses.replace(LAYER, gate_up=LAYER.qkv),)}, "gate_up has shape"),
        ({"layers": (LAYER, dataclasses.replace(LAYER, down=LAYER.attention_output))}, "down has shape"),
        ({"lm_head": LAYER.qkv}, "lm_head has shape"),
        ({"final_norm": torch.ones(95)}, "final_norm must be 96 float32 numbers"),
        ({"layers": (dataclasses.replace(LAYER, attention_norm=torch.ones(95)),)}, "attention_norm must be 96"),
        ({"layers": (dataclasses.replace(LAYER, qkv_bias=torch.ones(96)),)}, "qkv_bias must be 160 float32"),
        ({"layers": (dataclasses.replace(LAYER, down_bias=torch.ones(96).double()),)}, "down_bias must be 96 float32"),
        ({"layers": (LAYER, dataclasses.replace(LAYER, down_bias=torch.ones(96)))}, "not all layers have the same"),
        ({"layers": (dataclasses.replace(LAYER, rope_table=1),)}, "there is no rotary table 1"),
        ({"layers": (dataclasses.replace(LAYER, window=0),)}, "a window of 0 positions shows nothing"),
        ({"rope_tables": torch.ones(1, 600, 30)}, "rotary tables do not fit"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        dataclasses.replace(WEIGHTS, **changes)


MIXED = MIXTURE.layers[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"down": None}, "a layer needs gate_up and down, or experts"),
        ({"gate_up": None, "down": None, "experts": None}, "a layer needs gate_up and down, or experts"),
        ({"gate_up": None, "down": None}, "no shared expert for experts.shared_gate"),
        ({"down_bias": torch.ones(96)}, "beside experts networks have no biases"),
        ({"gate_up": MIXED.qkv}, "gate_up has shape"),
        ({"experts": {"gate_up": LAYER.gate_up}}, "experts.gate_up has shape"),
        ({"experts": {"down": random_packed_weight(7 * 96, 64, WeightFormat.INT4, 1)}}, "experts.down has shape"),
        ({"experts": {"routing": Routing(7, 2)}}, "all experts must have one routing"),
        ({"experts": {"router": torch.ones(7, 95)}}, "experts.router must have shape"),
        ({"experts": {"router": torch.ones(96, 7).T}}, "experts.router must be contiguous"),
        ({"experts": {"bias": torch.ones(7)}}, "a bias if that has one"),
        ({"experts": {"shared_gate": torch.ones(96).double()}}, "experts.shared_gate must be torch.float32"),
    ],
)
def test_parts_of_a_mixture_that_do_not_fit_together_are_refused(changes, problem):
    if changes.get("experts"):
        changes = {"experts": dataclasses.replace(MIXED.experts, **changes["experts"])}
    with pytest.raises(KernelArgumentError, match=problem):
        dataclasses.replace(MIXTURE, layers=(MIXED, dataclasses.replace(MIXED, **changes)))


def test_int8_blocks_that_no_tile_fits_are_refused():
    caches = [torch.zeros(2, 64, 1, 8, 36, dtype=torch.int8) for _ in range(2)]
    refused("int8 blocks of 8 slots of 32 are not supported", *caches)


def test_heads_of_a_size_that_groups_do_not_divide_are_refused():
    """48 is no multiple of 32: the inputs of a group would belong to two heads."""
    with pytest.raises(KernelArgumentError, match="must be multiples of 32"):
        dataclasses.replace(
            WEIGHTS,
            layers=(dataclasses.replace(LAYER, qkv=random_packed_weight(4 * 48, 96, WeightFormat.INT4, 1)),),
            num_heads=2,
            head_dim=48,
            rope_tables=torch.ones(1, 600, 48),
        )


def test_weights_on_another_device_are_refused():
    elsewhere = dataclasses.replace(WEIGHTS.embedding, data=WEIGHTS.embedding.data.to("meta"))
    with pytest.raises(UnsupportedDeviceError, match="decoder has no implementation for device 'meta'"):
        Decoder(dataclasses.replace(WEIGHTS, embedding=elsewhere))
