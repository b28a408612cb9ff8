"""sampling in plain numpy, a row at a time, as the package's docstring defines it: everything sorted, all noise drawn.

The masses that top_p compares are float64 here too; a token may differ from another implementation's where the mass
before it equals top_p to within rounding.
"""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.sampling.columns import (
    PENALTIES,
    DrawRules,
    LogitRules,
    SampleOutcome,
    Samples,
    SamplingParameters,
    TokenLists,
    TokenMasks,
)

_Float32Array = npt.NDArray[np.float32]
_UInt32Array = npt.NDArray[np.uint32]


def philox4x32(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> _UInt32Array:
    """Philox4x32-10. counter: [n, 4], words below 2**32. Returns [n, 4]."""
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    k0, k1 = key
    mask, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product_0, product_1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product_1 >> high) ^ c1 ^ np.uint64(k0), product_1 & mask
        c2, c3 = (product_0 >> high) ^ c3 ^ np.uint64(k1), product_0 & mask
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def gumbel_noise(vocab_size: int, seed: int, offset: int) -> _Float32Array:
    """The noise of every token. seed: 0 to 2**64 - 1. Returns [vocab_size]."""
    counter = np.zeros((-(-vocab_size // 4), 4), dtype=np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = offset
    words = philox4x32(counter, (seed % 2**32, seed >> 32)).reshape(-1)[:vocab_size]
    u = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: _Float32Array = -np.log(-np.log(u))
    return noise


def filtered(scaled: _Float32Array, top_k: int, top_p: float, min_p: float) -> _Float32Array:
    """The scaled logits, -inf where a filter drops the token."""
    left = scaled.copy()
    if min_p > 0:
        left[scaled < scaled.max() + np.log(np.float32(min_p))] = -np.inf
    if 0 < top_k < len(left):
        left[left < np.sort(left)[-top_k]] = -np.inf
    if top_p < 1:
        order = np.argsort(-left, kind="stable")
        masses = np.exp(left[order].astype(np.float64) - left.max())
        before = (np.cumsum(masses) - masses) / masses.sum()
        dropped = before >= top_p
        dropped[0] = False
        left[order[dropped]] = -np.inf
    return left


def ruled(logits: _Float32Array, rules: LogitRules, row: int) -> _Float32Array:
    """A row's logits with its rules applied, by masks and counts as long as the vocabulary."""

    def listed(lists: TokenLists) -> npt.NDArray[np.int32]:
        token_ids: npt.NDArray[np.int32] = _listed(lists, row).numpy()
        return token_ids

    left = logits.copy()
    allowed = listed(rules.allowed)
    if len(allowed):
        left[~np.isin(np.arange(len(left)), allowed)] = -np.inf
    left[listed(rules.forbidden)] = -np.inf
    start, end = rules.biased.cu_lens[row : row + 2].tolist()
    left[listed(rules.biased)] += rules.biases.numpy()[start:end]
    counts = np.bincount(listed(rules.output), minlength=len(left))
    is_seen = (counts > 0) | np.isin(np.arange(len(left)), listed(rules.prompt))
    repetition = rules.repetition_penalty.numpy()[row]
    repeated = np.where(left > 0, left / repetition, left * repetition)
    left = np.where(is_seen, repeated, left)
    left -= rules.frequency_penalty.numpy()[row] * counts.astype(np.float32)
    left -= rules.presence_penalty.numpy()[row] * (counts > 0).astype(np.float32)
    return left


def rules_of_draws(rules: DrawRules, offsets: torch.Tensor) -> LogitRules:
    """The same rules as lists of each draw. offsets: those of the draws."""
    kept = rules.of_rows
    draws = list(zip(rules.rows.tolist(), offsets.tolist(), strict=True))
    forbidden, prompt, output = [], [], []
    for row, offset in draws:
        tokens = rules.token_ids[row, : rules.num_prompt[row] + offset] if row >= 0 else rules.token_ids[0, :0]
        prompt.append(tokens[: len(tokens) - offset])
        output.append(tokens[len(tokens) - offset :])
        forbidden.append(torch.tensor(_forbidden(rules, row, output[-1].tolist()), dtype=torch.int32))

    def lists(tokens: list[torch.Tensor]) -> TokenLists:
        ends = torch.tensor([0, *map(len, tokens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return TokenLists(ends, torch.cat(tokens))

    def penalty(of_rows: torch.Tensor, off: float) -> torch.Tensor:
        return torch.tensor([of_rows[row].item() if row >= 0 else off for row, _ in draws])

    return LogitRules(
        allowed=lists([_listed(kept.allowed, row) for row, _ in draws]),
        forbidden=lists(forbidden),
        biased=lists([_listed(kept.biased, row) for row, _ in draws]),
        biases=torch.cat([_listed(TokenLists(kept.biased.cu_lens, kept.biases), row) for row, _ in draws]),
        prompt=lists(prompt),
        output=lists(output),
        **{name: penalty(getattr(kept, name), off) for name, off in PENALTIES.items()},
    )


def _forbidden(rules: DrawRules, row: int, output: list[int]) -> list[int]:
    """What a row cannot draw after this output: tokens that are withheld, and the last ones of words."""
    if row < 0:
        return []
    kept = rules.of_rows
    forbidden = _listed(kept.withheld, row).tolist() if len(output) < kept.min_tokens[row] else []
    for word in range(*kept.cu_words[row : row + 2].tolist()):
        *before, last = _listed(kept.words, word).tolist()
        if output[len(output) - len(before) :] == before:
            forbidden.append(last)
    return forbidden


def _listed(lists: TokenLists, row: int) -> torch.Tensor:
    """One of the lists; below 0 an empty one."""
    start, end = lists.cu_lens[row : row + 2].tolist() if row >= 0 else (0, 0)
    return lists.token_ids[start:end]


def masked(logits: _Float32Array, masks: TokenMasks, row: int) -> _Float32Array:
    """A row's logits, -inf where the mask has no bit."""
    mask = int(masks.of_draws[row])
    if not 0 <= mask < len(masks.words):
        return logits
    words = masks.words[mask].tolist()
    bits = [words[token // 32] >> token % 32 & 1 for token in range(len(logits))]
    return np.where(bits, logits, np.float32(-np.inf))


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    rules: LogitRules | DrawRules | None = None,
    masks: TokenMasks | None = None,
) -> Samples:
    if isinstance(rules, DrawRules):
        rules = rules_of_draws(rules, parameters.offsets)
    rows = [_sample_row(logits.numpy()[row], parameters, rules, masks, row) for row in range(len(logits))]
    num_top = max([0, *parameters.num_logprobs.tolist()])
    logprobs = torch.log_softmax(logits.double(), dim=-1).float()
    top = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    token_ids = torch.tensor([token for token, _ in rows], dtype=torch.int32)
    return Samples(
        token_ids=token_ids,
        outcomes=torch.tensor([outcome for _, outcome in rows], dtype=torch.int32),
        logprobs=logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1),
        top_token_ids=top.indices[:, :num_top].int(),
        top_logprobs=top.values[:, :num_top],
    )


def _sample_row(
    logits: _Float32Array,
    parameters: SamplingParameters,
    rules: LogitRules | None,
    masks: TokenMasks | None,
    row: int,
) -> tuple[int, SampleOutcome]:
    if not np.isfinite(logits).all():
        return 0, SampleOutcome.NOT_FINITE
    if masks is not None:
        logits = masked(logits, masks, row)
    if rules is not None:
        logits = ruled(logits, rules, row)
    if logits.max() == -np.inf:
        return 0, SampleOutcome.NOTHING_LEFT
    temperature = np.float32(parameters.temperature[row])
    with np.errstate(over="ignore"):
        is_greedy = temperature < np.float32(1e-5) or not np.isfinite((logits / temperature).max())
    if is_greedy:
        return int(np.argmax(logits)), SampleOutcome.DRAWN
    left = filtered(
        logits / temperature, int(parameters.top_k[row]), float(parameters.top_p[row]), float(parameters.min_p[row])
    )
    seed = int(parameters.seeds[row]) % 2**64
    noise = gumbel_noise(len(left), seed, int(parameters.offsets[row]))
    return int(np.argmax(left + noise)), SampleOutcome.DRAWN
