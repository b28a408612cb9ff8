"""EAGLE-3 drafts: they change no token, whatever the head is; those of a head that has learnt are right."""

import functools
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.device_numerics import TWIN_NUMERICS
from paceline_executor.errors import StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.models.device_eagle3 import DeviceEagle3Head
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import build_model
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, WeightKind
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.cuda import DeviceRunner
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.speculation.drafter import WantedDrafts, WantingRow
from paceline_executor.testing.drafters import head_drafter, wanted_drafts
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.eagle3 import random_head
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.plans import GREEDY, int32, placement, plan
from paceline_executor.testing.random_plans import LIMITS, Request, Scheduler
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden
from paceline_kernels.sampling.reference import gumbel_noise

TARGET = tiny_checkpoint(
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    intermediate_size=96,
    vocab_size=LIMITS.vocab_size,
    max_model_len=LIMITS.max_model_len,
)
PACKED = Numerics(WeightKind.PACKED, KvDtype.FLOAT16)
AUX_LAYERS = (2, 1)
MAX_DRAFTS = 5
COMMON_START = list(range(12))


class FragileRunner(CpuRunner):
    """One whose next step fails, after its work is done, where it is told to."""

    fails = False

    def launch(self, batch):
        output = super().launch(batch)
        if self.fails:
            self.fails = False
            raise RuntimeError("device lost")
        return output


def runner_in(numerics):
    """The target."""
    sizes = {"num_blocks": LIMITS.num_blocks, "block_size": LIMITS.block_size}
    return FragileRunner(TARGET, **sizes, numerics=numerics, max_model_len=LIMITS.max_model_len, num_threads=1)


def drafter_for(runner, folder, kind):
    """The head in this folder, which sees the runner's steps from now on. What it does not write is NaN."""
    drafter = head_drafter(runner, folder, TARGET.config, kind, LIMITS)
    for cache in (drafter._kv_cache.keys, drafter._kv_cache.values):
        cache.fill_(float("nan"))
    return drafter


@functools.cache
def plain(numerics, prompt):
    """The greedy output of a prompt as long as it can be, decoded without drafts."""
    driver = Driver(CpuRunner(TARGET, num_blocks=8, block_size=LIMITS.block_size, numerics=numerics, num_threads=1))
    (tokens,) = driver.run([driver.add(list(prompt))], LIMITS.max_model_len - len(prompt))
    return tokens


def expected(numerics, request):
    """The output of a request: plain decoding until it ends."""
    tokens = plain(numerics, tuple(request.prompt))[: request.max_tokens]
    return tokens[: tokens.index(request.end_token) + 1] if request.end_token in tokens else tokens


class Run:
    """Requests served by random plans: chunks, mixed rows, shared and copied blocks, preemptions, takeovers."""

    def __init__(self, runner, drafter, wanted, seed, most=MAX_DRAFTS):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.runner = runner
        self.everyone = [
            Request(f"request-{i}", COMMON_START[:num_common] + own, max_tokens, end_token)
            for i, (num_common, own, max_tokens, end_token) in enumerate(wanted)
        ]
        self.engine = Engine(RowTable(replace(LIMITS, max_num_draft_tokens=most), drafter), runner)
        self.scheduler = Scheduler(self.random, self.everyone, most)
        self.counts = Counter()

    def serve(self, failures=0.0):
        """Until all requests are done. failures: how often a step fails, and a successor takes over."""
        while not self.scheduler.is_done:
            planned = self.scheduler.plan()
            self.runner.fails = self.random.random() < failures
            try:
                result = self.engine.collect(self.engine.launch(planned))
            except StepFailedError:
                self.scheduler.rebuild(self.engine.table.states())
                self.counts["failed"] += 1
                continue
            finally:
                self.runner.fails = False
            self.scheduler.take(planned, result)
            accepted = int(np.maximum(result.num_accepted - 1, 0).sum())
            self.counts.update(verified=int(result.num_draft_tokens.sum()), accepted=accepted)
            self.counts.update(preempted=len(planned.releases), copied=planned.copies.sources.size)
        return [request.output for request in self.everyone]


wanted = st.tuples(
    st.integers(0, 11), st.lists(st.integers(0, 49), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 49)
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("numerics", [FLOAT32_NUMERICS, PACKED], ids=["float32", "packed"])
def test_a_head_that_knows_nothing_changes_no_token(tmp_path, numerics):
    runner, reached = runner_in(numerics), Counter()
    folder = random_head(TARGET.config, aux_layers=AUX_LAYERS, draft_vocab_size=30).write(tmp_path / "head")
    drafter = drafter_for(runner, folder, numerics.weights)

    @settings(max_examples=settings.default.max_examples // 6)
    @given(st.lists(wanted, min_size=2, max_size=5), st.integers(0, 2**32), st.integers(1, 8))
    def outputs_are_those_of_plain_decoding(wanted, seed, most):
        run = Run(runner, drafter, wanted, seed, most)
        assert run.serve(failures=0.1) == [expected(numerics, request) for request in run.everyone]
        reached.update(run.counts)

    outputs_are_those_of_plain_decoding()
    for outcome in ("verified", "failed", "preempted", "copied"):
        assert reached[outcome] >= 5, reached
    assert reached["accepted"] < reached["verified"] / 4, reached


class Lessons:
    """What a head sees after the beginnings of sequences, and what follows: computed whole, without rows and steps."""

    def __init__(self, parts, folder, numerics):
        self.numerics = numerics
        self.norm = torch.from_numpy(parts.tensors["norm.weight"])
        self.model = build_model(TARGET, LIMITS.max_model_len, numerics.weights)
        checkpoint = eagle3_from_folder(parts.write(folder), TARGET.config)
        self.head = Eagle3Head(checkpoint, self.model.embed, LIMITS.max_model_len, numerics.weights)
        self.seen, self.following = [], []

    def learn(self, tokens, first, depth):
        """Each token from `first` on, after those before it, or after up to `depth` of them as drafts."""
        features = self.head.features(self.states(tokens[:-1]))
        for known in range(2, len(tokens)):
            cache = new_cache((LIMITS.max_model_len,), torch.float32)
            found, _ = self.head.forward(features[: known - 1], inputs_of(tokens[1:known], 0), cache)
            for place in range(known, min(known + depth, len(tokens))):
                if place > known:
                    found, _ = self.head.forward(found, inputs_of(tokens[place - 1 : place], place - 2), cache)
                if place >= first:
                    self.seen.append(found[0] / (found[0].square().mean() + 1e-5).sqrt() * self.norm)
                    self.following.append(tokens[place])

    def states(self, tokens):
        """What flows between layers of the target."""
        aux = AuxHidden(AUX_LAYERS, torch.empty(len(tokens), len(AUX_LAYERS), TARGET.config.hidden_size))
        dtype = torch.float32 if self.numerics is FLOAT32_NUMERICS else torch.float16
        cache = new_cache((TARGET.config.num_layers, LIMITS.max_model_len), dtype)
        self.model.forward(inputs_of(tokens, 0), cache, aux=aux)
        return aux.states

    def lm_head(self, target_ids):
        """The matrix of least squares: 10 for what followed."""
        wanted = 10.0 * (np.array(self.following)[:, None] == target_ids)
        return np.ascontiguousarray((np.linalg.pinv(torch.stack(self.seen).numpy()) @ wanted).T, dtype=np.float32)


def new_cache(sizes, dtype):
    """Blocks of one slot."""
    *layers, num_slots = sizes
    shape = (*layers, num_slots, TARGET.config.num_kv_heads, 1, TARGET.config.head_dim)
    return KvCache(*(torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"))


def inputs_of(tokens, start):
    """One row that computes these tokens, from position `start` on; the last one is wanted."""
    positions = torch.arange(start, start + len(tokens), dtype=torch.int32)
    return ForwardInputs(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=positions,
        slot_mapping=positions.long(),
        cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
        context_lens=positions[-1:] + 1,
        block_tables=torch.arange(LIMITS.max_model_len, dtype=torch.int32)[None],
        logit_tokens=torch.tensor([len(tokens) - 1], dtype=torch.int32),
    )


# How much of the common start, what else, how many tokens; with an end token that none of them draws.
APART = [(0, [11, 3, 9], 12, 45), (0, [17, 5], 12, 45), (0, [40, 7, 8, 9, 10], 12, 45), (0, [30, 31], 12, 45)]
SHARING = [(11, [3, 9], 8, 45), (11, [5], 8, 45), (2, [40, 7, 8], 8, 45), (0, [30, 31], 8, 45)]


@pytest.mark.parametrize(("wanted", "share"), [(APART, 1.0), (SHARING, 0.75)], ids=["apart", "sharing"])
@pytest.mark.parametrize("numerics", [FLOAT32_NUMERICS, PACKED], ids=["float32", "packed"])
def test_a_head_that_has_learnt_is_right(tmp_path, numerics, wanted, share):
    """Its output matrix is fitted to what follows in these requests, over a reduced vocabulary.

    Among chunks, mixed rows, wrong numbers of drafts and preemptions all its drafts are right, as are those behind
    drafts. In a block that others began it may see what they go on with: those who share blocks have fewer.
    """
    runner = runner_in(numerics)
    outputs, parts = learnt_head(tmp_path, numerics, wanted)
    drafter = drafter_for(runner, parts.write(tmp_path / "head"), numerics.weights)
    assert_right(runner, drafter, wanted, outputs, share)


@pytest.mark.parametrize(("wanted", "share"), [(APART, 1.0), (SHARING, 0.75)], ids=["apart", "sharing"])
def test_a_head_that_has_learnt_is_right_on_a_device(tmp_path, wanted, share):
    outputs, parts = learnt_head(tmp_path, FLOAT32_NUMERICS, wanted)
    runner = device_runner(parts.write(tmp_path / "head"))
    assert_right(runner, None, wanted, outputs, share)


def device_runner(folder):
    """The target, for which the head in this folder drafts, on the twin of a device."""
    checkpoint, limits = eagle3_from_folder(folder, TARGET.config), replace(LIMITS, max_num_draft_tokens=MAX_DRAFTS)
    model = LlamaModel(HostWeights(TARGET), LIMITS.max_model_len)
    tensors = lambda name: torch.from_numpy(checkpoint.tensor(name))  # noqa: E731
    embed = None if checkpoint.has_embedding else model.embed
    head = DeviceEagle3Head(checkpoint.config, tensors, embed, LIMITS.max_model_len)
    geometry = kv_geometry(TARGET.config, LIMITS.num_blocks, LIMITS.block_size, FLOAT32_NUMERICS)
    ids = None if checkpoint.target_ids is None else torch.from_numpy(checkpoint.target_ids).long()
    runner = DeviceRunner(
        TwinDevice(),
        model,
        allocate_kv_cache(geometry, KvDtype.FLOAT32),
        geometry,
        limits,
        buckets=buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens, MAX_DRAFTS),
        drafting=drafting_by_head(head, ids, TWIN_NUMERICS, limits, Splits.EVEN),
    )
    runner.warm_up()
    return runner


def learnt_head(tmp_path, numerics, wanted):
    """The outputs of these requests, and a head that knows them."""
    requests = Run(runner_in(numerics), None, wanted, 0).everyone
    outputs = [expected(numerics, request) for request in requests]
    target_ids = np.array(sorted({*np.concatenate(outputs).tolist(), *range(0, LIMITS.vocab_size, 3)}))
    parts = random_head(TARGET.config, aux_layers=AUX_LAYERS, draft_vocab_size=target_ids.size)
    lessons = Lessons(parts, tmp_path / "probe", numerics)
    for request, output in zip(requests, outputs, strict=True):
        lessons.learn(request.prompt + output, len(request.prompt), depth=MAX_DRAFTS)
    parts.tensors["lm_head.weight"] = lessons.lm_head(target_ids)
    parts.tensors["d2t"] = target_ids - np.arange(target_ids.size)
    parts.tensors["t2d"] = np.isin(np.arange(LIMITS.vocab_size), target_ids)
    return outputs, parts


def assert_right(runner, drafter, wanted, outputs, share):
    """So many of what it drafts for these requests, however they are served."""
    counts = Counter()
    for seed in range(20):
        run = Run(runner, drafter, wanted, seed)
        assert run.serve() == outputs
        counts.update(run.counts)
    assert counts["verified"] >= 100
    assert counts["accepted"] >= share * counts["verified"]


def steps_of(engine, sampling):
    """Drafts verified and tokens brought of each step of a request, whose steps may have so many, and all tokens."""
    cells = [(0, cell, cell) for cell in range(LIMITS.max_blocks_per_row)]
    contents = {"place": [placement(0, [1, 2, 3], max_tokens=24, sampling=sampling)], "grants": cells}
    steps, tokens, num_known = [], [], 3
    for most in (0, 1, 2, 5, 3, 0, 4):
        num_drafts = max(0, min(most, LIMITS.max_model_len - 3 - len(tokens) - 2))
        drafts = [num_drafts] if num_drafts else ()
        result = engine.collect(engine.launch(plan([(0, num_known + num_drafts)], drafts=drafts, **contents)))
        steps.append((int(result.num_draft_tokens.sum()), int(result.num_accepted[0])))
        tokens += result.token_ids.tolist()
        contents, num_known = {}, 1
    return steps, tokens


@pytest.mark.parametrize("has_embedding", [False, True])
def test_a_device_drafts_what_a_cpu_drafts(tmp_path, has_embedding):
    """A head that knows nothing, for requests of three tokens: each step verifies and accepts as many."""
    parts = random_head(TARGET.config, aux_layers=AUX_LAYERS, has_embedding=has_embedding)
    folder, limits = parts.write(tmp_path / "head"), replace(LIMITS, max_num_draft_tokens=MAX_DRAFTS)
    on_device, steps = device_runner(folder), []
    for seed in range(6):
        sampling = replace(GREEDY, temperature=1.0, seed=seed, allowed_token_ids=(1, 2, 3))
        runner = runner_in(FLOAT32_NUMERICS)
        drafter = drafter_for(runner, folder, WeightKind.FLOAT32)
        expected_steps = steps_of(Engine(RowTable(limits, drafter), runner), sampling)
        assert steps_of(Engine(RowTable(limits), on_device), sampling) == expected_steps
        steps += expected_steps[0]
    verified, brought = (sum(column) for column in zip(*steps, strict=True))
    assert 0 < brought - len(steps) < verified


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_drawn_with_the_noise_that_the_target_has_for_its_own_ids(tmp_path, seed):
    runner, prompt = runner_in(FLOAT32_NUMERICS), [7, 30, 2, 41, 41, 9, 13]
    parts = random_head(TARGET.config, aux_layers=AUX_LAYERS, draft_vocab_size=20, seed=seed)
    drafter = drafter_for(runner, parts.write(tmp_path / "head"), WeightKind.FLOAT32)
    driver = Driver(runner)
    row = driver.add(prompt, max_chunk=3)
    driver.run([row], 1)
    spare = next(block for block in range(LIMITS.num_blocks) if block not in row.blocks)
    sampling = replace(wanted_drafts([(0, [0], 1)]).sampling, temperature=np.float32([0.8]), seeds=np.uint64([seed]))
    wanting = WantingRow(0, int32(row.token_ids), 4, int32([*row.blocks, spare]), len(prompt))
    (drafts,) = drafter.draft(WantedDrafts([wanting], replace(sampling, offsets=int32([1]))))

    lessons, known = Lessons(parts, tmp_path / "probe", FLOAT32_NUMERICS), row.token_ids
    cache = new_cache((LIMITS.max_model_len,), torch.float32)
    features = lessons.head.features(lessons.states(known[:-1]))
    found, logits = lessons.head.forward(features, inputs_of(known[1:], 0), cache)
    target_ids, expected_drafts = np.flatnonzero(parts.tensors["t2d"]), []
    for offset in range(1, 5):
        noise = gumbel_noise(LIMITS.vocab_size, seed, offset)[target_ids]
        expected_drafts.append(int(target_ids[np.argmax(logits.numpy()[0] / np.float32(0.8) + noise)]))
        last = len(known) - 2 + offset
        found, logits = lessons.head.forward(found, inputs_of(expected_drafts[-1:], last), cache)
    assert drafts.tolist() == expected_drafts


def test_a_row_whose_tokens_the_target_has_not_computed_has_no_drafts(tmp_path):
    runner = runner_in(FLOAT32_NUMERICS)
    folder = random_head(TARGET.config, aux_layers=AUX_LAYERS).write(tmp_path / "head")
    drafter = drafter_for(runner, folder, WeightKind.FLOAT32)
    driver = Driver(runner)
    row = driver.add([5, 6, 7, 8, 9, 10], max_chunk=4)
    driver.step([row])
    tables = [[*row.blocks, 0]] * 3
    none, single, some = drafter.draft(
        wanted_drafts([(0, row.token_ids, 3), (1, [5], 3), (2, row.token_ids[:5], 3)], tables)
    )
    assert (none.size, single.size, some.size) == (0, 0, 3)
