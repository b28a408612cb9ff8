"""How tokens are drawn, what of that has a range, and what a model's files recommend. Refuses to know requests."""

from dataclasses import dataclass

from paceline.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling. temperature 0 is greedy, top_k 0 unlimited. What is not named changes nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 to 2^64 - 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, each once, and what is added to their logits
    allowed_token_ids: tuple[int, ...] = ()  # empty: all


SAMPLING_RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, is_open=True),
}
"""What can be sampled with, for the parameters whose range is the same whatever the model."""
MAX_LOGIT_BIAS = 100.0  # and down to its negative


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model's files recommend; None: nothing. ValueError, naming it, for what cannot be sampled with."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 means unlimited
    min_p: float | None = None
    repetition_penalty: float | None = None  # 1 changes nothing

    def __post_init__(self) -> None:
        for name, allowed in (SAMPLING_RANGES | {"top_k": Range(0, 2**31 - 1)}).items():
            value = getattr(self, name, None)
            if value is not None and value not in allowed:
                raise ValueError(f"{name} {value} is {allowed.outside}")


NO_DEFAULTS = GenerationDefaults()
