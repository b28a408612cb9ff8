"""What follows a right draft is drawn with the model's probabilities, as if nobody had drafted."""

from dataclasses import replace

import numpy as np
import pytest

from drafting.drafters import KnowingDrafter
from executor_rig.cpu import NUM_ROWS, cpu_rig
from executor_rig.driving import Draw, DrivenRow, step_batch
from hash_twin import HostDrafter
from model_inputs import Row, inputs_of
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.runner.device.drafts import launching
from random_models import tiny_checkpoint

NUM_STEPS, NUM_GROUPS, TEMPERATURE = 24, 8, 0.3
PROMPT = [1, 2, 3]
MAX_MISFIT = 30.0  # chi-square of 7 degrees of freedom: exceeded once in 10,000 times


@pytest.fixture(
    scope="module",
    params=[FLOAT32_NUMERICS, Numerics(MatrixKind.PACKED, KvDtype.INT8)],
    ids=["float32", "packed"],
)
def new_runner(request):
    """Of a small model, for which this drafter drafts."""
    checkpoint = tiny_checkpoint(num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=96)
    size = {"num_blocks": 4, "block_size": 16, "numerics": request.param, "max_drafts": 1}
    on_device = lambda drafter: launching(HostDrafter(drafter, 512), 1)  # noqa: E731
    return lambda drafter: cpu_rig(checkpoint, drafting=lambda *_: on_device(drafter), **size).runner


def probabilities_behind(runner, tokens):
    """Of every token, at the temperature; by the model's logits."""
    inputs = inputs_of(Row(tokens, [0]), block_size=16, only_last=True)
    logits = runner._device.run(lambda: runner._model.hidden(inputs, runner._kv_cache).clone())
    return (logits[0].double() / TEMPERATURE).softmax(0).numpy()


def misfit(tokens, probabilities):
    """Pearson's chi-square, over groups of tokens of about the same probability."""
    groups = np.minimum((np.cumsum(probabilities) - probabilities / 2) * NUM_GROUPS, NUM_GROUPS - 1).astype(int)
    expected = np.bincount(groups, probabilities, NUM_GROUPS) * len(tokens)
    seen = np.bincount(groups[tokens], minlength=NUM_GROUPS)
    some = expected > 0
    return float((((seen - expected) ** 2)[some] / expected[some]).sum()) + 1e9 * seen[~some].sum()


def drawn_behind(runner):
    """Tokens of rows that differ in their seeds alone, on the same block; each computes its prompt and a draft."""
    for step in range(NUM_STEPS):
        draws = [Draw(TEMPERATURE, seed=step * NUM_ROWS + row) for row in range(NUM_ROWS)]
        rows = [DrivenRow([*PROMPT], len(PROMPT), draw, [0], len(PROMPT)) for draw in draws]
        batch = step_batch(rows, [len(PROMPT)] * NUM_ROWS, range(NUM_ROWS))
        ones = np.ones_like(batch.rows)
        drafting = replace(batch, num_tokens=batch.num_tokens + 1, context_lens=batch.context_lens + 1, num_drafts=ones)
        output = runner.wait(runner.launch(drafting))
        assert (output.num_verified == 1).all()
        yield from np.split(output.token_ids, np.cumsum(output.num_accepted)[:-1])


def test_draws_before_and_behind_a_right_draft_fit_the_model(new_runner):
    """Over 1536 seeds: Pearson's test of both draws; the second does not fall as the first does."""
    plain = new_runner(KnowingDrafter([], lambda _: 0))
    first = probabilities_behind(plain, PROMPT)
    draft = int(first.argmax())
    second = probabilities_behind(plain, [*PROMPT, draft])
    drawn = list(drawn_behind(new_runner(KnowingDrafter([[*PROMPT, draft]], lambda num_wanted: num_wanted))))
    befores = np.array([tokens[0] for tokens in drawn])
    behinds = np.array([tokens[1] for tokens in drawn if len(tokens) == 2])
    assert behinds.size == (befores == draft).sum() >= 200
    assert misfit(befores, first) < MAX_MISFIT
    assert misfit(behinds, second) < MAX_MISFIT
    assert misfit(behinds, first) > MAX_MISFIT
