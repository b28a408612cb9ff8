"""sampling on a GPU: what rules make of a copy of a row's logits, in the order of the package's docstring.

Rows without rules are not copied. Knows lists of tokens; not how a token is drawn. A token beyond the vocabulary, which
a CPU refuses, changes nothing.
"""

import triton
import triton.language as tl

# Of a count: this token's logit has been changed.
_DONE = tl.constexpr(-1)


# Lists lie anywhere in what the host has sent: another alignment must not be another compilation.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("cu_allowed", "cu_forbidden", "cu_biased"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ]
)
def copy_ruled_kernel(
    logits,  # [rows, vocab] float32
    ruled,  # the same shape: the copy, of rows that have rules; -inf where a row says what is allowed
    is_ruled,  # [rows] int32: whether a row has rules
    cu_allowed,  # and the next two: [rows + 1] int32
    cu_forbidden,
    cu_biased,
    presence_penalty,  # and the next two: [rows] float32
    frequency_penalty,
    repetition_penalty,
    vocab,
    BLOCK: tl.constexpr,
):
    """A program per row and BLOCK tokens."""
    parts = tl.cdiv(vocab, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    num_allowed = tl.load(cu_allowed + row + 1) - tl.load(cu_allowed + row)
    num_forbidden = tl.load(cu_forbidden + row + 1) - tl.load(cu_forbidden + row)
    num_biased = tl.load(cu_biased + row + 1) - tl.load(cu_biased + row)
    is_changed = (num_allowed + num_forbidden + num_biased > 0) | _has_penalties(
        tl.load(presence_penalty + row), tl.load(frequency_penalty + row), tl.load(repetition_penalty + row)
    )
    if part == 0:
        tl.store(is_ruled + row, is_changed.to(tl.int32))
    if is_changed:
        tokens = part * BLOCK + tl.arange(0, BLOCK)
        places = row * vocab + tokens
        left = tl.load(logits + places, mask=tokens < vocab, other=0.0)
        tl.store(ruled + places, tl.where(num_allowed > 0, float("-inf"), left), mask=tokens < vocab)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("cu_allowed", "allowed", "cu_forbidden", "forbidden", "cu_biased", "biased", "biases"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("cu_prompt", "prompt", "cu_output", "output"),
    ]
)
def apply_rules_kernel(
    logits,  # [rows, vocab] float32
    ruled,  # the same shape, as `copy_ruled_kernel` leaves it
    is_ruled,  # [rows] int32
    cu_allowed,  # lists of tokens: [rows + 1] int32, and [cu_lens[-1]] int32
    allowed,
    cu_forbidden,
    forbidden,
    cu_biased,
    biased,
    biases,  # [cu_biased[-1]] float32
    presence_penalty,  # and the next two: [rows] float32
    frequency_penalty,
    repetition_penalty,
    cu_prompt,
    prompt,
    cu_output,
    output,
    counts,  # [rows, vocab] int32, for the program's own use; None where no row lists prompt or output
    vocab,
    BLOCK: tl.constexpr,
):
    """A program per row, list by list; each is done by all threads before the next begins."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_ruled + row) != 0:
        given, left = logits + row * vocab, ruled + row * vocab
        for place in range(tl.load(cu_allowed + row), tl.load(cu_allowed + row + 1), BLOCK):
            tokens, exists, _ = _listed(cu_allowed + row, allowed, place, vocab, BLOCK)
            tl.store(left + tokens, tl.load(given + tokens, mask=exists), mask=exists)
        tl.debug_barrier()
        for place in range(tl.load(cu_forbidden + row), tl.load(cu_forbidden + row + 1), BLOCK):
            tokens, exists, _ = _listed(cu_forbidden + row, forbidden, place, vocab, BLOCK)
            tl.store(left + tokens, float("-inf"), mask=exists)
        tl.debug_barrier()
        for place in range(tl.load(cu_biased + row), tl.load(cu_biased + row + 1), BLOCK):
            tokens, exists, places = _listed(cu_biased + row, biased, place, vocab, BLOCK)
            bias = tl.load(biases + places, mask=exists, other=0.0)
            tl.store(left + tokens, tl.load(left + tokens, mask=exists, other=0.0) + bias, mask=exists)
        tl.debug_barrier()
        presence, frequency = tl.load(presence_penalty + row), tl.load(frequency_penalty + row)
        repetition = tl.load(repetition_penalty + row)
        if counts is not None:
            if _has_penalties(presence, frequency, repetition):
                counts += row * vocab
                cu_prompt += row
                cu_output += row
                _count(counts, cu_prompt, prompt, cu_output, output, vocab, BLOCK)
                _penalize(left, counts, cu_output, output, presence, frequency, repetition, vocab, BLOCK)
                tl.debug_barrier()
                _penalize(left, counts, cu_prompt, prompt, 0.0, 0.0, repetition, vocab, BLOCK)


@triton.jit
def _count(counts, cu_prompt, prompt, cu_output, output, vocab, BLOCK: tl.constexpr):
    """How often each token is in the output; set for tokens of prompt and output only."""
    for place in range(tl.load(cu_prompt), tl.load(cu_prompt + 1), BLOCK):
        tokens, exists, _ = _listed(cu_prompt, prompt, place, vocab, BLOCK)
        tl.store(counts + tokens, 0, mask=exists)
    for place in range(tl.load(cu_output), tl.load(cu_output + 1), BLOCK):
        tokens, exists, _ = _listed(cu_output, output, place, vocab, BLOCK)
        tl.store(counts + tokens, 0, mask=exists)
    tl.debug_barrier()
    for place in range(tl.load(cu_output), tl.load(cu_output + 1), BLOCK):
        tokens, exists, _ = _listed(cu_output, output, place, vocab, BLOCK)
        tl.atomic_add(counts + tokens, 1, mask=exists, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _penalize(left, counts, cu_lens, token_ids, presence, frequency, repetition, vocab, BLOCK: tl.constexpr):
    """Change the logits of a list's tokens that are not done, each once: whoever marks a token as done changes it."""
    for place in range(tl.load(cu_lens), tl.load(cu_lens + 1), BLOCK):
        tokens, exists, _ = _listed(cu_lens, token_ids, place, vocab, BLOCK)
        count = tl.atomic_xchg(counts + tokens, _DONE, mask=exists, sem="relaxed")
        is_ours = exists & (count != _DONE)
        logit = tl.load(left + tokens, mask=is_ours, other=0.0)
        repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
        tl.store(left + tokens, repeated - frequency * count.to(tl.float32) - presence, mask=is_ours)


@triton.jit
def _listed(cu_lens, token_ids, place, vocab, BLOCK: tl.constexpr):
    """BLOCK tokens of a row's list from `place` on, whether there is one, and their places. cu_lens: at the row."""
    places = place + tl.arange(0, BLOCK)
    tokens = tl.load(token_ids + places, mask=places < tl.load(cu_lens + 1), other=-1)
    return tokens, (tokens >= 0) & (tokens < vocab), places


@triton.jit
def _has_penalties(presence, frequency, repetition):
    return (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)
