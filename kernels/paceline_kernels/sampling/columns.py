"""What sampling takes and gives, column by column."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller

import torch


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """One element per row of logits, contiguous, in range: the caller has checked them."""

    temperature: torch.Tensor  # [num_rows] float32, >= 0; 0 is greedy
    top_k: torch.Tensor  # [num_rows] int32, >= 0; 0 is off
    top_p: torch.Tensor  # [num_rows] float32, 0 < top_p <= 1; 1 is off
    min_p: torch.Tensor  # [num_rows] float32, 0 <= min_p <= 1; 0 is off
    seeds: torch.Tensor  # [num_rows] int64, the bits of the unsigned 64-bit seed
    offsets: torch.Tensor  # [num_rows] int32, the index of the output token that is drawn
    num_logprobs: torch.Tensor  # [num_rows] int32; below 0 none, 0 the chosen token's, n > 0 also the n best


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """Which columns of a row's logits one of several ranks has. All draw the same rows, and each finds all tokens."""

    vocab_size: int  # of all ranks together
    start: int = 0  # the token of the first column, a multiple of 4; ranks' columns follow each other
    rank: int = 0
    # Of a tensor that has one shape on all ranks: [ranks, *shape], by rank.
    gather: Callable[[torch.Tensor], torch.Tensor] = methodcaller("unsqueeze", 0)


@dataclass(frozen=True, slots=True)
class TokenLists:
    """A list of tokens per row, one list after another: those of row i are `token_ids[cu_lens[i]:cu_lens[i + 1]]`."""

    cu_lens: torch.Tensor  # [num_rows + 1] int32, from 0 on, ascending
    token_ids: torch.Tensor  # [cu_lens[-1]] int32


PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The penalties of a row by name, in the order in which kernels take them, each with what changes nothing."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes the logits of rows before tokens are drawn; the same contiguous columns for every row.

    A row is left alone by empty lists and by penalties of 0, 0 and 1. A row without penalties needs no prompt and
    output, one without a repetition penalty no prompt.
    """

    allowed: TokenLists  # the only tokens that can be drawn, each once; empty allows all
    forbidden: TokenLists  # tokens that cannot be drawn
    biased: TokenLists  # tokens whose logit is changed, each once
    biases: torch.Tensor  # [biased.cu_lens[-1]] float32, finite
    presence_penalty: torch.Tensor  # [num_rows] float32, finite
    frequency_penalty: torch.Tensor  # [num_rows] float32, finite
    repetition_penalty: torch.Tensor  # [num_rows] float32, > 0, finite
    prompt: TokenLists
    output: TokenLists

    def lists(self) -> tuple[tuple[str, TokenLists], ...]:
        """All lists by name."""
        names = ("allowed", "forbidden", "biased", "prompt", "output")
        lists = (self.allowed, self.forbidden, self.biased, self.prompt, self.output)
        return tuple(zip(names, lists, strict=True))

    @classmethod
    def none(cls, num_rows: int, device: torch.device) -> "LogitRules":
        """Those that change nothing."""
        zeros = torch.empty(num_rows + 1, dtype=torch.int32, device=device).zero_()
        off, one = (torch.empty(num_rows, dtype=torch.float32, device=device).fill_(value) for value in (0, 1))
        no_tokens = TokenLists(zeros, zeros[:0])
        return cls(no_tokens, no_tokens, no_tokens, off[:0], off, off, one, no_tokens, no_tokens)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be drawn, by bits: that of token t is bit `t % 32` of word `t // 32`."""

    words: torch.Tensor  # [num_masks, vocab / 32, rounded up] int32
    of_draws: torch.Tensor  # [num_draws] int32: the mask of each row of logits, below 0 none


@dataclass(frozen=True, slots=True)
class RuleTable:
    """What the device keeps of every row's rules: what stays as it is while the row draws. All contiguous.

    A row is left alone by empty lists and by penalties of 0, 0 and 1.
    """

    allowed: TokenLists  # this, the biases and the penalties as in LogitRules, of all rows that are kept
    biased: TokenLists
    biases: torch.Tensor
    presence_penalty: torch.Tensor  # [num_rows] float32, and the next two
    frequency_penalty: torch.Tensor
    repetition_penalty: torch.Tensor
    min_tokens: torch.Tensor  # [num_rows] int32: while the output has fewer tokens, those withheld cannot be drawn
    withheld: TokenLists
    words: TokenLists  # a list per word; its last token cannot be drawn where the output ends with those before it
    cu_words: torch.Tensor  # [num_rows + 1] int32: words cu_words[i]:cu_words[i + 1] are those of row i

    def lists(self) -> tuple[tuple[str, TokenLists], ...]:
        """The lists that there is one of per row, by name."""
        return (("allowed", self.allowed), ("biased", self.biased), ("withheld", self.withheld))


@dataclass(frozen=True, slots=True)
class DrawRules:
    """LogitRules of draws, as the device knows them: by rows, and by the tokens that lie in a row before each draw.

    The output before a draw are as many tokens behind the prompt as its offset says; drafts among them count as if they
    had been drawn.
    """

    of_rows: RuleTable
    rows: torch.Tensor  # [num_draws] int32: whose rules a draw has; -1 for none
    token_ids: torch.Tensor  # [num_rows, max_model_len] int32: prompt, output, drafts
    num_prompt: torch.Tensor  # [num_rows] int32


class SampleOutcome(enum.IntEnum):
    """What became of a row."""

    DRAWN = 0
    NOT_FINITE = 1  # a logit was NaN or infinite as it came
    NOTHING_LEFT = 2  # the rules mask every token


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn. Of a row that is not `DRAWN` the other values mean nothing."""

    token_ids: torch.Tensor  # [num_rows] int32
    outcomes: torch.Tensor  # [num_rows] int32, of SampleOutcome
    logprobs: torch.Tensor  # [num_rows] float32, of the chosen token; set where num_logprobs >= 0
    top_token_ids: torch.Tensor  # [num_rows, max(num_logprobs, 0)] int32, the likeliest first, the lower id on ties
    top_logprobs: torch.Tensor  # of the same shape, float32; each row is set up to its own num_logprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of given tokens; NaN where the row's logits are not finite."""

    logprobs: torch.Tensor  # [num_rows] float32
    top_token_ids: torch.Tensor  # [num_rows, num_top] int32, the likeliest first, the lower id on ties
    top_logprobs: torch.Tensor  # [num_rows, num_top] float32
