"""EAGLE-3 drafts: those of a head that has learnt are right. That none changes a token is shown beside this."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings

import model_inputs
from drafting.serving import Plain, RandomRun
from drafting.targets import KINDS, LIMITS, MODEL, Place
from executor_rig.plans import placement, plan
from model_inputs import Row
from paceline.plan.sampling import SamplingParams
from paceline_executor.link.engine import Engine
from paceline_executor.models.eagle3 import read_head
from paceline_executor.models.interface import KvCache
from paceline_executor.models.registry import build_model
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.draft_model import DeviceDraftModel
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden
from paceline_kernels.sampling.reference import gumbel_noise
from random_models.eagle3 import random_head

AUX_LAYERS = (2, 1)


class Lessons:
    """What a head sees after the beginnings of sequences, and what follows: computed whole, without rows and steps."""

    def __init__(self, parts, folder, numerics):
        self.numerics = numerics
        self.norm = torch.from_numpy(parts.tensors["norm.weight"])
        self.model = build_model(MODEL, LIMITS.max_model_len, numerics.matrices)
        checkpoint = eagle3_from_folder(parts.write(folder), MODEL.config)
        self.head = read_head(checkpoint, self.model.embed, LIMITS.max_model_len, numerics.matrices)
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
        aux = AuxHidden(AUX_LAYERS, torch.empty(len(tokens), len(AUX_LAYERS), MODEL.config.hidden_size))
        dtype = torch.float32 if self.numerics is FLOAT32_NUMERICS else torch.float16
        cache = new_cache((MODEL.config.num_layers, LIMITS.max_model_len), dtype)
        self.model.forward(inputs_of(tokens, 0), cache, aux=aux)
        return aux.states

    def lm_head(self, target_ids):
        """The matrix of least squares: 10 for what followed."""
        wanted = 10.0 * (np.array(self.following)[:, None] == target_ids)
        return np.ascontiguousarray((np.linalg.pinv(torch.stack(self.seen).numpy()) @ wanted).T, dtype=np.float32)


def new_cache(sizes, dtype):
    """Blocks of one slot."""
    *layers, num_slots = sizes
    shape = (*layers, num_slots, MODEL.config.num_kv_heads, 1, MODEL.config.head_dim)
    return KvCache(*(torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"))


def inputs_of(tokens, start):
    """One row that computes these tokens, from position `start` on; the last one is wanted."""
    return model_inputs.inputs_of(Row(tokens, range(LIMITS.max_model_len), start), block_size=1, only_last=True)


# Prompts and how many tokens; and an end token that none of them draws.
APART = [([11, 3, 9], 12), ([17, 5], 12), ([40, 7, 8, 9, 10], 12), ([30, 31], 12)]
SHARING = [([*range(11), 3, 9], 8), ([*range(11), 5], 8), ([0, 1, 40, 7, 8], 8), ([30, 31], 8)]
UNDRAWN = 45


@pytest.mark.parametrize(
    ("wanted", "share", "name"),
    [
        pytest.param(wanted, share, name, id=f"{name} {text}", marks=[] if text == quick else pytest.mark.slow)
        for name, quick in [("packed-float16", "sharing"), ("captured", "apart"), ("float32", None)]
        for wanted, share, text in [(SHARING, 0.75, "sharing"), (APART, 1.0, "apart")]
    ],
)
def test_a_head_that_has_learnt_is_right(tmp_path, wanted, share, name):
    """Its output matrix is fitted to what follows in these requests, over a reduced vocabulary.

    Among chunks, mixed rows, wrong numbers of drafts and preemptions all its drafts are right, as are those behind
    drafts. In a block that others began it may see what they go on with: those who share blocks have fewer.
    """
    requests = [placement(0, prompt, max_tokens=most, end_token_ids=[UNDRAWN]) for prompt, most in wanted]
    place = Place(KINDS[name])
    plain = Plain(place.runner(None), LIMITS)
    outcomes = [plain.outcome(request) for request in requests]
    head = place.run(lambda: learnt_head(tmp_path, place.kind.numerics, requests, outcomes))
    runner = place.runner(place.head(head.write(tmp_path / "head")))
    counts = Counter()
    for seed in range(min(20, settings.default.max_examples // 4)):
        run = RandomRun(Engine(RowTable(LIMITS), runner), requests, seed, LIMITS.max_num_draft_tokens)
        assert run.run() == outcomes
        counts.update(run.reached)
    assert counts["verified"] >= 50
    assert counts["accepted"] >= share * counts["verified"]


def learnt_head(folder, numerics, requests, outcomes):
    """A head that knows what comes of these requests."""
    outputs = [outcome.tokens for outcome in outcomes]
    target_ids = np.array(sorted({*np.concatenate(outputs).tolist(), *range(0, LIMITS.vocab_size, 3)}))
    parts = random_head(MODEL.config, aux_layers=AUX_LAYERS, draft_vocab_size=target_ids.size)
    lessons = Lessons(parts, folder / "probe", numerics)
    for request, output in zip(requests, outputs, strict=True):
        prompt = request.prompt_token_ids.tolist()
        lessons.learn(prompt + output, len(prompt), depth=LIMITS.max_num_draft_tokens)
    parts.tensors["lm_head.weight"] = lessons.lm_head(target_ids)
    parts.tensors["d2t"] = target_ids - np.arange(target_ids.size)
    parts.tensors["t2d"] = np.isin(np.arange(LIMITS.vocab_size), target_ids)
    return parts


def engine_with_head(parts, folder):
    """On a CPU, in float32."""
    place = Place(KINDS["float32"])
    return Engine(RowTable(LIMITS), place.runner(place.head(parts.write(folder))))


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_drawn_with_the_noise_that_the_target_has_for_its_own_ids(tmp_path, monkeypatch, seed):
    prompt, drafts, launch = [7, 30, 2, 41, 41], [], DeviceDraftModel.launch

    def launch_and_look(self, *asked):
        launch(self, *asked)
        self._device.launch(lambda: drafts.extend(self._rows.state.token_ids[0, 6:10].tolist()))

    monkeypatch.setattr(DeviceDraftModel, "launch", launch_and_look)
    parts = random_head(MODEL.config, aux_layers=AUX_LAYERS, draft_vocab_size=20, seed=seed)
    engine = engine_with_head(parts, tmp_path / "head")
    sampling = SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    contents = {"place": [placement(0, prompt, sampling=sampling)], "grants": [(0, cell, cell) for cell in range(4)]}
    first = engine.collect(engine.launch(plan([(0, 5)], **contents)))
    engine.collect(engine.launch(plan([(0, 1 + 4)], drafts=[4])))

    lessons, known = Lessons(parts, tmp_path / "probe", FLOAT32_NUMERICS), [*prompt, *first.token_ids.tolist()]
    cache = new_cache((LIMITS.max_model_len,), torch.float32)
    features = lessons.head.features(lessons.states(known[:-1]))
    found, hidden = lessons.head.forward(features, inputs_of(known[1:], 0), cache)
    target_ids, expected_drafts = np.flatnonzero(parts.tensors["t2d"]), []
    for offset in range(1, 5):
        logits = lessons.head.logits(hidden, Splits.EVEN)
        noise = gumbel_noise(LIMITS.vocab_size, seed, offset)[target_ids]
        expected_drafts.append(int(target_ids[np.argmax(logits.numpy()[0] / np.float32(0.8) + noise)]))
        last = len(known) - 2 + offset
        found, hidden = lessons.head.forward(found, inputs_of(expected_drafts[-1:], last), cache)
    assert drafts == expected_drafts


def test_a_row_whose_tokens_the_target_has_not_computed_has_no_drafts(tmp_path):
    """Nor has one of a single token, as a head looks at the one behind, and the next of either has."""
    engine = engine_with_head(random_head(MODEL.config, aux_layers=AUX_LAYERS), tmp_path / "head")
    place = [placement(0, [5, 6, 7, 8, 9, 10]), placement(1, [5]), placement(2, [5, 6])]
    grants = [(row, cell, 4 * row + cell) for row in range(3) for cell in range(4)]
    engine.collect(engine.launch(plan([(0, 4)], place=place, grants=grants)))
    plans = plan([(0, 2 + 1), (1, 1 + 3), (2, 2 + 3)], drafts=[1, 3, 3]), plan([(0, 1 + 3), (1, 1 + 3)], drafts=[3, 3])
    results = [engine.collect(engine.launch(planned)) for planned in plans]
    assert [result.num_draft_tokens.tolist() for result in results] == [[0, 0, 0], [3, 3]]
