"""sampling: one token per row of logits, drawn so that the same draw can be repeated anywhere, alone or in any batch.

Knows logits, parameters and rules; not what a token means, nor why one is masked.

The definition, which every implementation follows:

0. Where a row has a mask or rules, they change a copy of its logits, in float32 and in the order of vLLM's sampler
   (https://docs.vllm.ai/en/v0.20.0/api/vllm/v1/sample/sampler/): tokens whose bit is not set in the mask become -inf;
   all but the allowed tokens become -inf; forbidden tokens become -inf; biases are added; the logit of every token in
   prompt or output is divided by the repetition penalty if it is above 0, else multiplied by it; from that of every
   token in the output are taken the frequency penalty times its occurrences there, and then the presence penalty. A
   row whose every token is -inf draws none.
   What follows applies to the copy.
1. A temperature below 1e-5 takes the largest logit, the lowest id on ties, and nothing of what follows applies. So does
   one by which the largest logit divided is beyond float32.
2. scaled = logit / temperature, in float32. The filters apply to the scaled logits in the order of vLLM's sampler,
   each to what the one before has left, with probabilities that are the softmax over what is left:
   min_p (0: off) keeps scaled >= max(scaled) + log(min_p), in float32.
   top_k (0: off) keeps scaled >= the top_k-th largest; of tokens that tie with it all stay.
   top_p (1: off) keeps, in descending order of scaled, the lower id first on ties, a token if the mass before it is
   below top_p; so the first always stays.
3. The token is the one that is left with the largest scaled + gumbel, a float32 sum, the lowest id on ties.
   The Gumbel maximum draws from the softmax over what is left (Gumbel, 1954; Maddison et al., 2014,
   https://arxiv.org/abs/1411.0030).
4. gumbel = -log(-log(u)) in float32, u = ((word >> 9) + 0.5) / 2**23, exact in float32 and inside (0, 1), word being
   word `token_id % 4` of Philox4x32-10 (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405) with the counter
   (token_id // 4, offset, 0, 0) and the key (low, high half of the seed), lowest word first.
   So a gumbel is at most 16.64, and what is 2**23 times less likely than the likeliest token is never drawn.

Two devices whose logarithms differ in the last bit draw different tokens only where the two best scores are that close.
Log-probabilities are natural, of the softmax of the logits as given, before temperature and filters.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.sampling.columns import (
    PENALTIES,
    DrawRules,
    LogitRules,
    Logprobs,
    RuleTable,
    SampleOutcome,
    Samples,
    SamplingParameters,
    TokenLists,
    TokenMasks,
    VocabularySlice,
)

__all__ = [
    "PENALTIES",
    "DrawRules",
    "LogitRules",
    "Logprobs",
    "RuleTable",
    "SampleOutcome",
    "Samples",
    "SamplingParameters",
    "TokenLists",
    "TokenMasks",
    "VocabularySlice",
    "sample",
    "token_logprobs",
]


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    rules: LogitRules | DrawRules | None = None,
    masks: TokenMasks | None = None,
    *,
    max_logprobs: int | None = None,
    vocabulary: VocabularySlice | None = None,
) -> Samples:
    """Draw a token for every row of logits, [num_rows, vocab] contiguous, as the module defines.

    logits: float32; on a GPU bfloat16 and float16, too, of which the same becomes as of the same numbers in float32.
    Batch-invariant: rows do not influence each other. num_logprobs beyond the vocabulary counts as the vocabulary.
    max_logprobs: what num_logprobs counts as at most, and how many columns the best tokens have (none below 1). None
    looks for the largest of the column, which only a CPU can: a GPU would have to wait, and goes up to 1,024.
    Rules cost their rows what their lists are long, and one to three passes over the vocabulary, masks a pass; None
    costs nothing. A mask beyond those given is none.
    DrawRules are for hosts that need not know what has been drawn, and for rows that have several draws.
    vocabulary: the part of it that logits are of, on a CPU; all ranks find the bits of one that has all. None is all.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    num_rows = logits.shape[0]
    _check_logits("sample", logits)
    check_tensor("sample", "temperature", parameters.temperature, torch.float32, (num_rows,))
    check_tensor("sample", "top_k", parameters.top_k, torch.int32, (num_rows,))
    check_tensor("sample", "top_p", parameters.top_p, torch.float32, (num_rows,))
    check_tensor("sample", "min_p", parameters.min_p, torch.float32, (num_rows,))
    check_tensor("sample", "seeds", parameters.seeds, torch.int64, (num_rows,))
    check_tensor("sample", "offsets", parameters.offsets, torch.int32, (num_rows,))
    check_tensor("sample", "num_logprobs", parameters.num_logprobs, torch.int32, (num_rows,))
    if isinstance(rules, DrawRules):
        _check_draw_rules(rules, num_rows)
    elif rules is not None:
        _check_rules(rules, num_rows)
    if masks is not None:
        _check_masks(masks, logits)
    if is_cpu(logits.device):
        from paceline_kernels.sampling import cpu
        from paceline_kernels.sampling.draw_rules import rules_of_draws

        rules = rules_of_draws(rules, parameters.offsets) if isinstance(rules, DrawRules) else rules
        vocabulary = vocabulary or VocabularySlice(logits.shape[1])
        return cpu.sample(logits, parameters, rules, masks, max_logprobs, vocabulary)
    if gpu.has_kernels(logits.device):
        from paceline_kernels.sampling import triton

        _check_whole("sample", vocabulary)
        return triton.sample(logits, parameters, rules, masks, _known("sample", max_logprobs))
    raise UnsupportedDeviceError("sample", logits.device, gpu.DEVICES)


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: torch.Tensor,
    *,
    max_logprobs: int | None = None,
    vocabulary: VocabularySlice | None = None,
) -> Logprobs:
    """The log-probability of a token per row of logits, [num_rows, vocab], and of the likeliest ones.

    token_ids, num_logprobs: [num_rows] int32; num_logprobs as in SamplingParameters, all else as in `sample`. A row
    with a logit that is NaN or +inf gives NaN. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    num_rows = logits.shape[0]
    _check_logits("token_logprobs", logits)
    check_tensor("token_logprobs", "token_ids", token_ids, torch.int32, (num_rows,))
    check_tensor("token_logprobs", "num_logprobs", num_logprobs, torch.int32, (num_rows,))
    if is_cpu(logits.device):
        from paceline_kernels.sampling import cpu

        vocabulary = vocabulary or VocabularySlice(logits.shape[1])
        return cpu.token_logprobs(logits, token_ids, num_logprobs, max_logprobs, vocabulary)
    if gpu.has_kernels(logits.device):
        from paceline_kernels.sampling import triton

        _check_whole("token_logprobs", vocabulary)
        return triton.token_logprobs(logits, token_ids, num_logprobs, _known("token_logprobs", max_logprobs))
    raise UnsupportedDeviceError("token_logprobs", logits.device, gpu.DEVICES)


def _check_logits(op: str, logits: torch.Tensor) -> None:
    types = (torch.float32,) if is_cpu(logits.device) else (torch.float32, torch.bfloat16, torch.float16)
    if logits.dtype not in types:
        raise KernelArgumentError(op, f"logits must be {' or '.join(map(str, types))}, not {logits.dtype}")
    check_tensor(op, "logits", logits, logits.dtype, (None, None))


def _check_whole(op: str, vocabulary: VocabularySlice | None) -> None:
    if vocabulary is not None:
        raise KernelArgumentError(op, "vocabulary must be None on a GPU: its kernels draw from all logits")


def _known(op: str, max_logprobs: int | None) -> int:
    if max_logprobs is None:
        raise KernelArgumentError(op, "max_logprobs must be given on a GPU: looking for it would mean waiting")
    return max_logprobs


def _check_rules(rules: LogitRules, num_rows: int) -> None:
    for name, lists in rules.lists():
        _check_lists(name, lists, num_rows)
    _check_strengths(rules, num_rows)


def _check_masks(masks: TokenMasks, logits: torch.Tensor) -> None:
    # A rank's logits are of a part of the vocabulary.
    check_tensor("sample", "masks.words", masks.words, torch.int32, (None, None))
    if masks.words.shape[1] < -(-logits.shape[1] // 32):
        raise KernelArgumentError("sample", f"masks must have a bit for each of {logits.shape[1]} tokens")
    check_tensor("sample", "masks.of_draws", masks.of_draws, torch.int32, (logits.shape[0],))


def _check_draw_rules(rules: DrawRules, num_draws: int) -> None:
    kept, num_rows = rules.of_rows, rules.num_prompt.shape[0]
    for name, lists in kept.lists():
        _check_lists(name, lists, num_rows)
    _check_lists("words", kept.words, kept.words.cu_lens.shape[0] - 1)
    _check_strengths(kept, num_rows)
    check_tensor("sample", "cu_words", kept.cu_words, torch.int32, (num_rows + 1,))
    check_tensor("sample", "min_tokens", kept.min_tokens, torch.int32, (num_rows,))
    check_tensor("sample", "rules.rows", rules.rows, torch.int32, (num_draws,))
    check_tensor("sample", "rules.token_ids", rules.token_ids, torch.int32, (num_rows, None))
    check_tensor("sample", "rules.num_prompt", rules.num_prompt, torch.int32, (num_rows,))


def _check_lists(name: str, lists: TokenLists, num_lists: int) -> None:
    check_tensor("sample", f"{name}.cu_lens", lists.cu_lens, torch.int32, (num_lists + 1,))
    check_tensor("sample", f"{name}.token_ids", lists.token_ids, torch.int32, (None,))


def _check_strengths(rules: LogitRules | RuleTable, num_rows: int) -> None:
    check_tensor("sample", "biases", rules.biases, torch.float32, tuple(rules.biased.token_ids.shape))
    for name in PENALTIES:
        check_tensor("sample", name, getattr(rules, name), torch.float32, (num_rows,))
