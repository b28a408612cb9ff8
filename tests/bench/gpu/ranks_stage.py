"""The stage of ranks: several of one model on one GPU, in turn, and one alone of a model that is too large for it.

Knows which checks there are. What ranks send each other is added up in the GPU's memory, or left out: how long links
between GPUs take has to be measured where there are some.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from executor_rig.plans import GREEDY
from gpu.equality import GREEDY_AND_SEEDED, RoundedCheckpoint, agrees
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Step, limits_of, prompts_of, times_ms
from gpu.report import Report
from gpu.rigs import LLAMA_8B, Place, find_place, make_feed, uploaded
from gpu.stage import Task, run_stage
from joined_ranks import JoinedCollectives, TurnDevice, TurnGpu, joined
from kernel_rig.turns import Turns
from paceline.plan.sampling import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.models.registry import dummy_model, upload_model
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.buckets import Buckets
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.checkpoint import Checkpoint, Mixture, ModelConfig
from paceline_executor.weights.dummy import DummyCheckpoint
from paceline_executor.weights.sharded import ShardedCheckpoint
from paceline_kernels.linear import Splits
from paceline_kernels.routing import Routing
from random_models import FAMILY_CONFIGS, MIXTURE_CONFIGS, TINY_CONFIG

LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, intermediate_size=28_672, num_heads=64)
_SAMPLINGS = (GREEDY, SamplingParams(temperature=0.9, seed=3, top_p=0.9))
_SPARSE = Mixture(Routing(8, 3), 96, (True, True), 96, has_shared_gate=True)
_WIDE = Mixture(Routing(4, 2), 2048, (True, True))
_CONTEXT, _WARM_STEPS = 512, 8
Drawn = Callable[[], Sequence[list[list[int]]]]


class _NoLinks:
    """See Collectives: the bytes are copied, and nothing is added."""

    rank, degree = 0, 8

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part.expand(self.degree, *part.shape)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part.clone()


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    place = find_place(rehearses=task.rehearses)
    report, num_tokens, num_steps = report_on(place.name), 48, 10_000
    cases = list(itertools.product(("llama", "gemma3", "glm4moe"), (2, 4)))
    if task.rehearses:
        num_tokens, num_steps, cases = 6, 100, cases[:1]
    print(f"ranks on {place.name}", flush=True)
    for family, degree in cases:
        compared = partial(agrees, place, (FAMILY_CONFIGS | MIXTURE_CONFIGS)[family], GREEDY_AND_SEEDED, num_tokens)
        feed_of = partial(_feed_of, place, degree)
        report.check(f"{family} on {degree} ranks: tokens are the CPU's", partial(compared, feed_of=feed_of))
    for model, experts in {"": None, ", some experts each": _SPARSE, ", a part of each expert": _WIDE}.items():
        equal = partial(_has_equal_bits, place, num_tokens, experts)
        report.check(f"fixed splits: 1, 2 and 4 ranks have the same bits{model}", equal)
    report.check(f"{num_steps:,} steps of two ranks: both draw the same", partial(_stays_equal, place, num_steps))
    for num_rows in (1, 32, 256):
        shape = f"one of 8 ranks of 70B, {num_rows} rows at {_CONTEXT}"
        report.check(shape, partial(_one_of_many, place, num_rows, is_tiny=task.rehearses))
    return report


def _joined(
    place: Place, degree: int, checkpoint: Checkpoint, limits: RowLimits, splits: Splits = Splits.EVEN
) -> tuple[Feed, Drawn]:
    turns, numerics = Turns(degree), next(iter(place.numerics.values()))

    def of_rank(rank: int) -> DeviceRunner:
        device = TurnGpu(turns) if place.is_cuda else TurnDevice(turns)
        part, sums = ShardedCheckpoint(checkpoint, rank, degree), JoinedCollectives(turns, rank)
        model = upload_model(part, device.torch_device, limits.max_model_len, numerics, collectives=sums)
        geometry = kv_geometry(part.config, limits.num_blocks, limits.block_size, numerics)
        cache = allocate_on_device(geometry, numerics.kv, device.torch_device)
        return DeviceRunner(device, model, cache, geometry, limits, buckets=Buckets([]), splits=splits)

    runner, drawn = joined([of_rank(rank) for rank in range(degree)])
    return Feed(Engine(RowTable(limits), runner)), drawn


def _feed_of(place: Place, degree: int, checkpoint: Checkpoint, limits: RowLimits) -> Feed:
    return _joined(place, degree, checkpoint, limits)[0]


def _has_equal_bits(place: Place, num_tokens: int, experts: Mixture | None) -> str:
    config, lengths = replace(TINY_CONFIG, num_heads=8, num_kv_heads=4, experts=experts), (40, 7, 23)
    checkpoint = RoundedCheckpoint(config, TORCH_TYPES[next(iter(place.numerics.values())).dtype])
    limits = limits_of(config, len(lengths), max(lengths) + num_tokens)
    alone = make_feed(
        place, uploaded(place, checkpoint, limits.max_model_len), config, limits, splits=Splits.FIXED, is_captured=False
    )
    feeds = [alone, *(_joined(place, degree, checkpoint, limits, Splits.FIXED)[0] for degree in (2, 4))]
    found = [_outputs(feed, config, lengths, num_tokens) for feed in feeds]
    if found[1:] != found[:1] * 2:
        raise CheckFailedError(f"ranks have other bits: {found}")
    return f"{len(lengths)} streams of {num_tokens} tokens with log-probabilities"


def _outputs(
    feed: Feed, config: ModelConfig, lengths: Sequence[int], num_tokens: int
) -> list[tuple[list[int], list[bytes]]]:
    streams = [
        feed.add(prompt, num_tokens, _SAMPLINGS[index % 2], num_logprobs=4, max_chunk=16)
        for index, prompt in enumerate(prompts_of(config, lengths))
    ]
    feed.run()
    return [(one.output, [told.columns.top_logprobs.tobytes() for told in one.logprobs]) for one in streams]


def _stays_equal(place: Place, num_steps: int) -> str:
    checkpoint, max_len, num_landed = RoundedCheckpoint(TINY_CONFIG, torch.float32), 64, 0
    feed, drawn = _joined(place, 2, checkpoint, limits_of(TINY_CONFIG, 4, max_len))
    prompts = itertools.cycle(prompts_of(TINY_CONFIG, range(1, 20)))
    while num_landed < num_steps:
        for sampling in _SAMPLINGS * 2:
            feed.add(next(prompts), 40, sampling)
        steps: list[Step] = []
        feed.run(steps.append)
        num_landed += len(steps)
    different = [number for number, (one, other) in enumerate(drawn()) if one != other]
    if different:
        raise CheckFailedError(f"the ranks drew other tokens in step {different[0]} and {len(different) - 1} more")
    return f"{num_landed:,} steps"


def _one_of_many(place: Place, num_rows: int, *, is_tiny: bool) -> str:
    """The median step, and what its bytes alone would take."""
    whole = replace(TINY_CONFIG, num_heads=8, num_kv_heads=8) if is_tiny else LLAMA_70B
    config = ShardedCheckpoint(DummyCheckpoint(whole), 0, _NoLinks.degree).config
    context, num_steps = (16, 8) if is_tiny else (_CONTEXT, 64)
    numerics, device = next(iter(place.numerics.values())), place.device.torch_device
    limits = limits_of(config, num_rows, context + num_steps + _WARM_STEPS, max(64, num_rows))
    model = dummy_model(config, {}, device, limits.max_model_len, numerics, _NoLinks())
    feed = make_feed(place, model, config, limits)
    for prompt in prompts_of(config, [context] * num_rows):
        feed.add(prompt, num_steps + _WARM_STEPS, num_cached=context - 1)
    steps: list[Step] = []
    feed.run(steps.append)
    step_ms = statistics.median(times_ms([step for step in steps if step.num_rows == num_rows][_WARM_STEPS:]))
    num_bytes = model.weight_bytes + num_rows * context * numerics.bytes_per_token(config)
    bound_ms = 1e3 * num_bytes / _copied_per_s(place)
    return f"{step_ms:.2f} ms, {step_ms / bound_ms:.2f} x the {bound_ms:.2f} ms of its bytes; links not measured"


def _copied_per_s(place: Place) -> float:
    """Bytes that a copy reads and writes."""
    source = torch.empty(1 << (30 if place.is_cuda else 20), dtype=torch.uint8, device=place.device.torch_device)
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        place.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        place.synchronize()
        seconds.append(time.perf_counter() - begun)
    return 2 * source.numel() / min(seconds)


if __name__ == "__main__":
    sys.exit(run_stage("ranks", work))
