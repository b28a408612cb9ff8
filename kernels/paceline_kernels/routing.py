"""How a mixture's tokens choose their experts: one value, of which every family of models is a case.

Knows numbers. Refuses to know tensors, so that a model's files are judged without torch.
"""

import enum
from dataclasses import dataclass


class Score(enum.Enum):
    """What an expert's logit becomes, in float32, before experts are chosen by it."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # chosen by logits; the softmax is over the chosen ones alone


@dataclass(frozen=True, slots=True)
class Routing:
    """A token goes to the `top_k` experts with the largest scores, of equal ones to that with the lowest number.

    Experts may lie in groups of equal size: then only those of the `top_groups` best are chosen from, a group being as
    good as the sum of its two best scores. DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437.
    """

    num_experts: int  # of one, its score is a gate's: each token has it
    top_k: int  # 1 to num_experts
    score: Score = Score.SOFTMAX
    renormalises: bool = True  # the weights of the chosen are divided by their sum
    scaling: float = 1.0  # what weights are multiplied with at last
    has_bias: bool = False  # a number per expert, added to scores for the choice alone
    num_groups: int = 1  # divides num_experts
    top_groups: int = 1  # 1 to num_groups, with at least top_k experts in all
