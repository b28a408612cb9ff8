"""What simulated executors run: a model that is a hash, on a device with so much room and of such a speed."""

from dataclasses import dataclass, replace

from executor_rig.hash_runner import HashRule
from paceline.bytes_tokenizer import END_TOKEN_IDS, VOCAB_SIZE
from paceline.plan.values import GraphSizes
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description
from paceline_executor.runner.interface import Runner
from paceline_executor.start.loading import describe_simulated
from paceline_executor.start.opening import simulated_tokenizer
from simulation.device import StepFailure

NUM_BYTE_TOKENS = 256
MAX_PLANS_IN_FLIGHT = 4
_NUM_DOUBLING = 64  # a step of so many tokens takes twice as long as one of a single token
_GRAPHS = GraphSizes((1, 2, 4), (4, 8, 12, 16, 24, 32, 48))  # of devices that run ahead, as GPUs do


def make_rule(end_probability: float, salt: int = 0) -> HashRule:
    """Return how tokens are drawn, by executors and by those who check them."""
    return HashRule(VOCAB_SIZE, END_TOKEN_IDS, end_probability, salt)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model on a device.

    `is_ahead`: the device has several steps in flight, and hides what comes of them. `is_twin`: it is a GPU's twin and
    drafts itself.
    """

    limits: RowLimits
    rule: HashRule
    base_step_ns: int
    is_ahead: bool = False
    is_twin: bool = False
    failure: StepFailure = StepFailure.AT_LAUNCH

    def step_ns(self, num_tokens: int) -> int:
        return self.base_step_ns + self.base_step_ns * max(0, num_tokens - 1) // (_NUM_DOUBLING - 1)

    def describe(self, runner: Runner) -> Description:
        description = describe_simulated("simulated", runner, self.limits, simulated_tokenizer())
        return replace(description, graphs=_GRAPHS) if self.is_ahead else description
