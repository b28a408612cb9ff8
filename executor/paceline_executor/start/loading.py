"""From a configuration to a loaded model: fetch, read, allocate, warm up. Runs in the step thread.

Refuses to know file formats and computing, and imports the latter, with torch, only when it is needed.
"""

import os
from collections.abc import Callable
from dataclasses import replace

from paceline.bytes_tokenizer import PRINTABLE, VOCAB_SIZE
from paceline.process.command import ExitCode
from paceline_executor.config import Config, RunnerKind
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes, explained
from paceline_executor.ranks.group import OnLost
from paceline_executor.ranks.meeting import Meeting
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.drafter import PromptLookup
from paceline_executor.runner.interface import Runner
from paceline_executor.runner.simulated import BYTES_PER_TOKEN as SIMULATED_TOKEN_BYTES
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimeCurve, read_step_times
from paceline_executor.start.opening import (
    ProgressLog,
    forms_of,
    open_model,
    simulated_tokenizer,
)
from paceline_executor.start.runner_choice import choose_runner
from paceline_executor.start.sizing import ModelNeeds, limits_within
from paceline_executor.weights.tokenizer import TokenizerBundle

_SIMULATED_MODEL_LEN = 8192


def load(
    config: Config,
    on_lost: OnLost = lambda _: os._exit(ExitCode.FAILED),
    on_leaving: Callable[[], None] = lambda: None,
) -> Loaded:
    """Of several ranks: on_lost is told when one is lost, on_leaving when another node is to stop. Raises ModelError
    for the model's faults, StartError for the configuration's.
    """
    kind = choose_runner(config)
    if kind is RunnerKind.SIMULATED:
        return load_simulated(config, read_step_times(config.step_times) if config.step_times else StepTimeCurve())
    meeting = None if config.node is None else Meeting(config)
    progress = ProgressLog()
    opened = open_model(config, progress)
    ranks = None
    if config.tensor_parallel_size > 1:
        from paceline_executor.start.ranks import RankStart  # with torch, which takes seconds to import

        ranks = RankStart(config, kind, meeting, on_lost, on_leaving)
    if kind is RunnerKind.CPU:
        with explained("memory ran out while the model was loaded: free some, or raise its limits, also ulimit -v"):
            from paceline_executor.start.loading_cpu import load_on_cpu  # with torch, too

            return load_on_cpu(config, opened, progress, ranks)

    from paceline_executor.start.loading_device import load_on_device

    return load_on_device(config, kind, opened, progress, ranks)


def load_simulated(
    config: Config, step_times: StepTimeCurve, vocab_size: int = VOCAB_SIZE, engine: type[Engine] = Engine
) -> Loaded:
    """The tokenizer is one of bytes, and of words if the vocabulary is larger."""
    max_model_len = config.max_model_len or _SIMULATED_MODEL_LEN
    needs = ModelNeeds(0, SIMULATED_TOKEN_BYTES, max_model_len, vocab_size)
    limits = limits_within(config, needs, available_bytes())
    runner = SimulatedRunner(limits.num_blocks, limits.block_size, vocab_size, drawn=PRINTABLE, step_times=step_times)
    runner.draft_by(PromptLookup())
    tokenizer = simulated_tokenizer(vocab_size)
    description = describe_simulated(config.served_model_name or "simulated", runner, limits, tokenizer)
    forms = forms_of(tokenizer, vocab_size)
    return Loaded(engine(RowTable(limits, forms), runner), replace(description, forms=forms))


def describe_simulated(name: str, runner: Runner, limits: RowLimits, tokenizer: TokenizerBundle) -> Description:
    return Description(
        model=name,
        architecture="simulated",
        num_parameters=0,
        quantization="",
        limits=limits,
        geometry=runner.kv_geometry,
        kv_dtype="int32",
        tokenizer=tokenizer,
        step_points=runner.warm_up(),
        device="simulated",
        num_threads=0,
    )
