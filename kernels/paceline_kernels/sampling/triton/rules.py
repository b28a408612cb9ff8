"""sampling on a GPU: what rules make of a copy of a draw's logits, in the order of the package's docstring.

Draws without rules are not copied. Rules are lists per draw, or those of rows that have several draws each, whose
tokens so far are read where they lie. Knows lists of tokens; not how a token is drawn. A token beyond the vocabulary,
which a CPU refuses, changes nothing.
"""

import triton
import triton.language as tl

# Of a count: this token's logit has been changed.
_DONE = tl.constexpr(-1)


# Lists lie anywhere in what the host has sent: another alignment must not be another compilation.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "cu_allowed", "cu_forbidden", "min_tokens", "cu_words", "cu_biased", "offsets"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "mask_words", "masks"),
    ],
    do_not_specialize=["num_masks"],
)
def copy_ruled_kernel(
    logits,  # [draws, vocab], float32 or of 16 bits
    ruled,  # [draws, vocab] float32: the copy, of draws that have rules; -inf where mask or list do not allow a token
    is_ruled,  # [draws] int32: whether a draw has rules or a mask
    rows,  # [draws] int32, whose rules it has, below 0 for none; None: rules are of draws
    cu_allowed,  # and what follows: [rows + 1] int32
    cu_forbidden,
    cu_biased,
    cu_words,  # or None
    min_tokens,  # [rows] int32: what is forbidden is so before; None: for good
    offsets,  # [draws] int32
    presence_penalty,  # and the next two: [rows] float32
    frequency_penalty,
    repetition_penalty,
    mask_words,  # [num_masks, words] int32, a bit for each token, or None
    masks,  # [draws] int32: whose mask a draw has; outside 0 to num_masks - 1 none
    num_masks,
    vocab,
    BLOCK: tl.constexpr,
):
    """A program per draw and BLOCK tokens."""
    parts = tl.cdiv(vocab, BLOCK)
    draw = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    row = _row_of(rows, draw)
    mask = _mask_of(mask_words, masks, num_masks, draw)
    is_changed, num_allowed = mask >= 0, tl.full([], 0, tl.int32)
    if row >= 0:
        num_allowed = tl.load(cu_allowed + row + 1) - tl.load(cu_allowed + row)
        num_listed = tl.load(cu_biased + row + 1) - tl.load(cu_biased + row) + num_allowed
        num_listed += _forbidden_end(cu_forbidden, min_tokens, offsets, row, draw) - tl.load(cu_forbidden + row)
        if cu_words is not None:
            num_listed += tl.load(cu_words + row + 1) - tl.load(cu_words + row)
        is_changed |= (num_listed > 0) | _has_penalties(
            tl.load(presence_penalty + row), tl.load(frequency_penalty + row), tl.load(repetition_penalty + row)
        )
    if part == 0:
        tl.store(is_ruled + draw, is_changed.to(tl.int32))
    if is_changed:
        tokens = part * BLOCK + tl.arange(0, BLOCK)
        places = draw * vocab + tokens
        left = tl.load(logits + places, mask=tokens < vocab, other=0.0).to(tl.float32)
        left = _masked(left, tokens, tokens < vocab, mask_words, mask, vocab)
        tl.store(ruled + places, tl.where(num_allowed > 0, float("-inf"), left), mask=tokens < vocab)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "cu_allowed", "allowed", "cu_forbidden", "forbidden", "min_tokens", "cu_biased", "biased", "biases"),
        *("cu_words", "word_starts", "word_tokens", "offsets"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("cu_prompt", "prompt", "cu_output", "output", "num_prompt", "mask_words", "masks"),
    ],
    do_not_specialize=["num_masks"],
)
def apply_rules_kernel(
    logits,  # [draws, vocab], float32 or of 16 bits
    ruled,  # [draws, vocab] float32, as `copy_ruled_kernel` leaves it
    is_ruled,  # [draws] int32
    rows,  # and others of the same names: as given to `copy_ruled_kernel`
    cu_allowed,  # lists of tokens: [rows + 1] int32, and [cu_lens[-1]] int32
    allowed,
    cu_forbidden,
    forbidden,
    cu_biased,
    biased,
    biases,  # [cu_biased[-1]] float32
    cu_words,  # words of rows, and tokens of words, as lists of lists; None where there are none
    word_starts,
    word_tokens,
    min_tokens,
    offsets,
    presence_penalty,  # and the next two: [rows] float32
    frequency_penalty,
    repetition_penalty,
    cu_prompt,  # lists; None: prompt and output both lie in memory of rows, MAX_TOKENS apart
    prompt,
    cu_output,
    output,
    num_prompt,  # [rows] int32, or None
    counts,  # [draws, vocab] int32, for the program's own use; None where no draw lists prompt or output
    mask_words,
    masks,
    num_masks,
    vocab,
    MAX_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per draw, list by list; each is done by all threads before the next begins."""
    draw = tl.program_id(0).to(tl.int64)
    if tl.load(is_ruled + draw) == 0:
        return
    row = _row_of(rows, draw)
    if row < 0:
        return
    given, left = logits + draw * vocab, ruled + draw * vocab
    mask = _mask_of(mask_words, masks, num_masks, draw)
    _allow(given, left, cu_allowed + row, allowed, mask_words, mask, vocab, BLOCK)
    forbidden_end = _forbidden_end(cu_forbidden, min_tokens, offsets, row, draw)
    _forbid(left, cu_forbidden + row, forbidden, forbidden_end, vocab, BLOCK)
    if cu_words is not None:
        said = output + row * MAX_TOKENS + tl.load(num_prompt + row)
        _forbid_words(left, cu_words + row, word_starts, word_tokens, said, tl.load(offsets + draw), vocab, BLOCK)
    _add_biases(left, cu_biased + row, biased, biases, vocab, BLOCK)
    presence, frequency = tl.load(presence_penalty + row), tl.load(frequency_penalty + row)
    repetition = tl.load(repetition_penalty + row)
    if counts is not None:
        if _has_penalties(presence, frequency, repetition):
            counts += draw * vocab
            if num_prompt is None:
                prompt, prompt_len = _list(cu_prompt + row, prompt)
                output, output_len = _list(cu_output + row, output)
            else:
                prompt, prompt_len = prompt + row * MAX_TOKENS, tl.load(num_prompt + row)
                output, output_len = prompt + prompt_len, tl.load(offsets + draw)
            prompt_len = tl.where(repetition != 1.0, prompt_len, 0)
            _count(counts, prompt, prompt_len, output, output_len, vocab, BLOCK)
            _penalize(left, counts, output, output_len, presence, frequency, repetition, vocab, BLOCK)
            tl.debug_barrier()
            _penalize(left, counts, prompt, prompt_len, 0.0, 0.0, repetition, vocab, BLOCK)


@triton.jit
def _row_of(rows, draw):
    """Whose rules a draw has: int64, below 0 for none."""
    if rows is None:
        return draw
    else:
        return tl.load(rows + draw).to(tl.int64)


@triton.jit
def _list(start, token_ids):
    """Where a list begins, and how long it is. start: where its start is to be loaded from."""
    return token_ids + tl.load(start), tl.load(start + 1) - tl.load(start)


@triton.jit
def _forbidden_end(cu_forbidden, min_tokens, offsets, row, draw):
    """Where a row's list of forbidden tokens ends: where it begins, once the row has as many tokens as it must."""
    end = tl.load(cu_forbidden + row + 1)
    if min_tokens is not None:
        is_early = tl.load(offsets + draw) < tl.load(min_tokens + row)
        end = tl.where(is_early, end, tl.load(cu_forbidden + row))
    return end


@triton.jit
def _mask_of(mask_words, masks, num_masks, draw):
    """A draw's mask, below 0 for none."""
    mask = tl.full([], -1, tl.int32)
    if mask_words is not None:
        mask = tl.load(masks + draw)
        mask = tl.where(mask < num_masks, mask, -1)
    return mask


@triton.jit
def _masked(left, tokens, exists, mask_words, mask, vocab):
    """The logits of these tokens, -inf where the mask has no bit."""
    if mask_words is not None:
        if mask >= 0:
            words = mask_words + mask.to(tl.int64) * tl.cdiv(vocab, 32)
            bits = tl.load(words + tokens // 32, mask=exists, other=0) >> (tokens % 32)
            left = tl.where((bits & 1) != 0, left, float("-inf"))
    return left


@triton.jit
def _allow(given, left, cu_allowed, allowed, mask_words, mask, vocab, BLOCK: tl.constexpr):
    """The logits of a list's tokens become those given, where a mask allows them. cu_allowed: at the row."""
    end = tl.load(cu_allowed + 1)
    for place in range(tl.load(cu_allowed), end, BLOCK):
        tokens, exists = _listed(allowed, place, end, vocab, BLOCK)
        logit = tl.load(given + tokens, mask=exists, other=0.0).to(tl.float32)
        tl.store(left + tokens, _masked(logit, tokens, exists, mask_words, mask, vocab), mask=exists)
    tl.debug_barrier()


@triton.jit
def _forbid(left, start, token_ids, end, vocab, BLOCK: tl.constexpr):
    """The logits of a list's tokens become -inf. start: where its start is to be loaded from."""
    for place in range(tl.load(start), end, BLOCK):
        tokens, exists = _listed(token_ids, place, end, vocab, BLOCK)
        tl.store(left + tokens, float("-inf"), mask=exists)
    tl.debug_barrier()


@triton.jit
def _forbid_words(left, cu_words, word_starts, word_tokens, said, num_said, vocab, BLOCK: tl.constexpr):
    """The last token of every word of a row whose other tokens are the last ones that were said becomes -inf."""
    end = tl.load(cu_words + 1)
    for first in range(tl.load(cu_words), end, BLOCK):
        words = first + tl.arange(0, BLOCK)
        start = tl.load(word_starts + words, mask=words < end, other=0)
        last = tl.load(word_starts + words + 1, mask=words < end, other=0) - 1
        is_said = (last >= start) & (last - start <= num_said)
        for back in range(1, tl.max(tl.where(is_said, last - start, 0)) + 1):
            has_more = is_said & (last - start >= back)
            wanted = tl.load(word_tokens + last - back, mask=has_more, other=0)
            is_said &= (last - start < back) | (tl.load(said + num_said - back) == wanted)
        token = tl.load(word_tokens + last, mask=is_said, other=-1)
        tl.store(left + token, float("-inf"), mask=(token >= 0) & (token < vocab))
    tl.debug_barrier()


@triton.jit
def _add_biases(left, cu_biased, biased, biases, vocab, BLOCK: tl.constexpr):
    """cu_biased: at the row."""
    end = tl.load(cu_biased + 1)
    for place in range(tl.load(cu_biased), end, BLOCK):
        tokens, exists = _listed(biased, place, end, vocab, BLOCK)
        bias = tl.load(biases + place + tl.arange(0, BLOCK), mask=exists, other=0.0)
        tl.store(left + tokens, tl.load(left + tokens, mask=exists, other=0.0) + bias, mask=exists)
    tl.debug_barrier()


@triton.jit
def _count(counts, prompt, prompt_len, output, output_len, vocab, BLOCK: tl.constexpr):
    """How often each token is in the output; set for tokens of prompt and output only."""
    for place in range(0, prompt_len, BLOCK):
        tokens, exists = _listed(prompt, place, prompt_len, vocab, BLOCK)
        tl.store(counts + tokens, 0, mask=exists)
    for place in range(0, output_len, BLOCK):
        tokens, exists = _listed(output, place, output_len, vocab, BLOCK)
        tl.store(counts + tokens, 0, mask=exists)
    tl.debug_barrier()
    for place in range(0, output_len, BLOCK):
        tokens, exists = _listed(output, place, output_len, vocab, BLOCK)
        tl.atomic_add(counts + tokens, 1, mask=exists, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _penalize(left, counts, token_ids, count, presence, frequency, repetition, vocab, BLOCK: tl.constexpr):
    """Change the logits of `count` tokens that are not done, each once: whoever marks a token as done changes it."""
    for place in range(0, count, BLOCK):
        tokens, exists = _listed(token_ids, place, count, vocab, BLOCK)
        times = tl.atomic_xchg(counts + tokens, _DONE, mask=exists, sem="relaxed")
        is_ours = exists & (times != _DONE)
        logit = tl.load(left + tokens, mask=is_ours, other=0.0)
        repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
        tl.store(left + tokens, repeated - frequency * times.to(tl.float32) - presence, mask=is_ours)


@triton.jit
def _listed(token_ids, place, end, vocab, BLOCK: tl.constexpr):
    """BLOCK tokens of a list from `place` on, and which of them there are."""
    places = place + tl.arange(0, BLOCK)
    tokens = tl.load(token_ids + places, mask=places < end, other=-1)
    return tokens, (tokens >= 0) & (tokens < vocab)


@triton.jit
def _has_penalties(presence, frequency, repetition):
    return (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)
