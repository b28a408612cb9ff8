"""What simulated executors run: a model that is a hash, on a device with so much room and of such a speed."""

from dataclasses import dataclass

from paceline.bytes_tokenizer import CHAT_TEMPLATE, END_TOKEN_IDS, VOCAB_SIZE, make_bytes_tokenizer
from paceline.plan.values import GenerationDefaults
from paceline_executor.link.description import Description
from paceline_executor.rows.limits import RowLimits
from paceline_executor.runner.interface import Runner
from paceline_executor.testing.hash_runner import HashRule
from paceline_executor.weights.tokenizer import TokenizerBundle

NUM_BYTE_TOKENS = 256
MAX_PLANS_IN_FLIGHT = 4
_TOKENIZER = make_bytes_tokenizer()
_MANY_TOKENS = 64  # a step of so many takes twice as long as one of a single token


def make_rule(end_probability: float, salt: int = 0) -> HashRule:
    """Return how tokens are drawn, by executors and by those who check them."""
    return HashRule(VOCAB_SIZE, END_TOKEN_IDS, end_probability, salt)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model on a device.

    `is_ahead`: the device has several steps in flight, and hides what comes of them. `fails_late`: a step that fails
    does so while it computes, and the device with it.
    """

    limits: RowLimits
    rule: HashRule
    base_step_ns: int
    is_ahead: bool = False
    fails_late: bool = False

    def step_ns(self, num_tokens: int) -> int:
        """Return how long a step takes."""
        return self.base_step_ns + self.base_step_ns * max(0, num_tokens - 1) // (_MANY_TOKENS - 1)

    def describe(self, runner: Runner) -> Description:
        """Return what an executor says about itself that runs it."""
        bundle = TokenizerBundle(
            tokenizer_json=_TOKENIZER,
            chat_template=CHAT_TEMPLATE,
            bos_token_id=None,
            eos_token_id=END_TOKEN_IDS[0],
            pad_token_id=None,
            end_token_ids=END_TOKEN_IDS,
            add_bos=False,
            defaults=GenerationDefaults(),
            digest="bytes",
        )
        return Description(
            model="simulated",
            architecture="simulated",
            num_parameters=0,
            quantization="",
            limits=self.limits,
            geometry=runner.kv_geometry,
            kv_dtype="token ids",
            tokenizer=bundle,
            step_points=runner.warm_up(),
            device="none",
            num_threads=0,
        )
