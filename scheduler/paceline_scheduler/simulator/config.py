"""What a simulated executor pretends to be."""

from dataclasses import dataclass, field
from itertools import pairwise

from paceline.plan.values import StepPoint
from paceline_scheduler.simulator.tokens import AcceptanceRule, TokenRule


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """The bounds, the model and the speed of a simulated executor.

    `step_points` are measured step times, by tokens ascending; times in between lie on the line between neighbours,
    times beyond on the line through the last two.
    """

    model: str = "simulated"
    num_blocks: int = 64
    block_size: int = 4
    max_num_rows: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    max_plans_in_flight: int = 4
    tag_key: bytes = bytes(range(32))
    tokens: TokenRule = field(default_factory=TokenRule)
    acceptance: AcceptanceRule = field(default_factory=AcceptanceRule)
    step_points: tuple[StepPoint, ...] = (StepPoint(1, 1_000_000), StepPoint(64, 4_000_000))

    def step_ns(self, num_tokens: int) -> int:
        """Return the time of a step of this many tokens."""
        if not self.step_points or num_tokens == 0:
            return 0
        left = right = self.step_points[0]
        for first, second in pairwise(self.step_points):
            left, right = first, second
            if num_tokens <= second.num_tokens:
                break
        if left.num_tokens == right.num_tokens:
            return right.duration_ns
        slope = (right.duration_ns - left.duration_ns) / (right.num_tokens - left.num_tokens)
        return max(0, round(left.duration_ns + slope * (num_tokens - left.num_tokens)))
