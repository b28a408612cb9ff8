"""DrawRules as the LogitRules that they stand for, for CPUs: lists per draw, made of a row's lists and its tokens.

Knows rows and lists of tokens; not what rules do to logits.
"""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.sampling.columns import PENALTIES, DrawRules, LogitRules, RuleTable, TokenLists

_Int32Array = npt.NDArray[np.int32]
_IntArray = npt.NDArray[np.integer]


def rules_of_draws(rules: DrawRules, offsets: torch.Tensor) -> LogitRules | None:
    """The same rules as lists of each draw; None if no draw has any. offsets: those of the draws."""
    kept, rows, offset = rules.of_rows, rules.rows.numpy(), offsets.numpy()
    exists = rows >= 0
    rows = np.where(exists, rows, 0)
    penalties = {name: np.where(exists, getattr(kept, name).numpy()[rows], off) for name, off in PENALTIES.items()}
    is_penalized = np.any([strengths != PENALTIES[name] for name, strengths in penalties.items()], axis=0)
    drawing = np.flatnonzero(exists)
    draws, forbidden = _forbidden(rules, drawing, rows, offset)
    allowed, biased = _lengths(kept.allowed, rows) * exists, _lengths(kept.biased, rows) * exists
    if not (is_penalized.any() or len(forbidden) or allowed.any() or biased.any()):
        return None
    biased_at = _flat(kept.biased.cu_lens.numpy()[rows], biased)
    tokens, num_prompt = rules.token_ids.numpy().reshape(-1), rules.num_prompt.numpy()[rows]
    starts = rows.astype(np.int64) * rules.token_ids.shape[1]
    prompt = np.where(penalties["repetition_penalty"] != PENALTIES["repetition_penalty"], num_prompt, 0)
    output = np.where(is_penalized, offset, 0)
    return LogitRules(
        allowed=_lists(allowed, kept.allowed.token_ids.numpy()[_flat(kept.allowed.cu_lens.numpy()[rows], allowed)]),
        forbidden=_lists(np.bincount(draws, minlength=len(rows)), forbidden[np.argsort(draws, kind="stable")]),
        biased=_lists(biased, kept.biased.token_ids.numpy()[biased_at]),
        biases=torch.from_numpy(kept.biases.numpy()[biased_at]),
        prompt=_lists(prompt, tokens[_flat(starts, prompt)]),
        output=_lists(output, tokens[_flat(starts + num_prompt, output)]),
        **{name: torch.from_numpy(strengths.astype(np.float32)) for name, strengths in penalties.items()},
    )


def _forbidden(
    rules: DrawRules, draws: _IntArray, rows: _IntArray, offset: _Int32Array
) -> tuple[_IntArray, _Int32Array]:
    """What draws cannot draw, as pairs of draw and token: what is withheld, and what words would end with."""
    kept = rules.of_rows
    withheld = _lengths(kept.withheld, rows[draws]) * (offset[draws] < kept.min_tokens.numpy()[rows[draws]])
    withheld_at = _flat(kept.withheld.cu_lens.numpy()[rows[draws]], withheld)
    word_draws, last_tokens = _said_words(kept, rules, draws, rows, offset)
    return (
        np.concatenate((np.repeat(draws, withheld), word_draws)),
        np.concatenate((kept.withheld.token_ids.numpy()[withheld_at], last_tokens)),
    )


def _said_words(
    kept: RuleTable, rules: DrawRules, draws: _IntArray, rows: _IntArray, offset: _Int32Array
) -> tuple[_IntArray, _Int32Array]:
    """Draws before which an output ends with all but the last token of a word, and that token."""
    cu_words, ends = kept.cu_words.numpy(), kept.words.cu_lens.numpy()[1:]
    num_words = cu_words[rows[draws] + 1] - cu_words[rows[draws]]
    words, draws = _flat(cu_words[rows[draws]], num_words), np.repeat(draws, num_words)
    before = np.diff(kept.words.cu_lens.numpy())[words] - 1
    fits = before <= offset[draws]
    words, draws, before = words[fits], draws[fits], before[fits]
    word_tokens, tokens = kept.words.token_ids.numpy(), rules.token_ids.numpy()
    output_ends = rules.num_prompt.numpy()[rows[draws]] + offset[draws]
    is_said = np.ones(len(words), dtype=np.bool_)
    for back in range(1, before.max(initial=0) + 1):
        left = np.flatnonzero(is_said & (before >= back))
        said = tokens[rows[draws[left]], output_ends[left] - back]
        is_said[left] = said == word_tokens[ends[words[left]] - 1 - back]
    return draws[is_said], word_tokens[ends[words[is_said]] - 1]


def _lengths(lists: TokenLists, rows: _IntArray) -> _IntArray:
    lengths: _IntArray = np.diff(lists.cu_lens.numpy())[rows]
    return lengths


def _flat(starts: _IntArray, lengths: _IntArray) -> _IntArray:
    """starts[0], starts[0] + 1, ..., as many as lengths[0] says, then those of the next."""
    ends = np.cumsum(lengths)
    indices: _IntArray = np.arange(lengths.sum())
    indices += np.repeat(starts - ends + lengths, lengths)
    return indices


def _lists(lengths: _IntArray, token_ids: _Int32Array) -> TokenLists:
    cu_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_lens[1:])
    return TokenLists(torch.from_numpy(cu_lens), torch.from_numpy(token_ids))
