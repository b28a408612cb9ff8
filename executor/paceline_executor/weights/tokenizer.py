"""All that turning text into token ids and back needs, in one value that can be sent to another process.

Knows what a bundle holds and promises. Where its parts come from is known to `tokenizer_gguf` and `tokenizer_folder`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

# Texts of the tokens with which chat models end a turn, a message or a document. A model trained on several may emit
# any of them (SmolLM2: <|im_end|> after a turn, <|endoftext|> after a document), and its file names only one as "eos".
END_TOKEN_TEXTS = frozenset(
    {
        "</s>",
        "<EOT>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's token is spelt with these letters)
    }
)


MAX_TEMPERATURE = 100
MAX_REPETITION_PENALTY = 10


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values the model's files recommend; None where they name none.

    Raises ValueError, naming the value, for one that cannot be sampled with.
    """

    temperature: float | None = None  # from 0, which is greedy, to 100
    top_p: float | None = None  # above 0, at most 1
    top_k: int | None = None  # 0 means unlimited
    min_p: float | None = None  # from 0 to 1
    repetition_penalty: float | None = None  # above 0, at most 10; 1 changes nothing

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature {self.temperature} is outside 0 to {MAX_TEMPERATURE}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not above 0 and at most 1")
        if self.top_k is not None and not 0 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k {self.top_k} is outside 0 to 2147483647")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} is outside 0 to 1")
        penalty = self.repetition_penalty
        if penalty is not None and not 0 < penalty <= MAX_REPETITION_PENALTY:
            raise ValueError(f"repetition_penalty {penalty} is not above 0 and at most {MAX_REPETITION_PENALTY}")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a role, each within the vocabulary; None where the model has none."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: tuple[int, ...]  # any of them ends a generation; eos first, no id twice
    add_bos: bool  # a plain-text prompt starts with bos; a rendered chat template already has its own


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A tokenizer, its chat template and its special tokens.

    Encode with `add_special_tokens=False` and put `bos_token_id` first where `add_bos` says so: a post-processor inside
    `tokenizer_json` is not to be relied on. Texts of special tokens, such as <|im_start|>, encode to their single ids.
    """

    tokenizer_json: bytes  # as the tokenizers library serialises itself
    chat_template: str | None  # jinja2 source, untrusted
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: tuple[int, ...]
    add_bos: bool
    defaults: GenerationDefaults
    digest: str  # hex of a 128-bit hash over all of the above; equal bundles have equal digests


def make_bundle(
    tokenizer_json: bytes, chat_template: str | None, special: SpecialTokens, defaults: GenerationDefaults
) -> TokenizerBundle:
    """Put the parts together and sign them with their digest."""
    rest = json.dumps([chat_template, asdict(special), asdict(defaults)], sort_keys=True)
    digest = hashlib.blake2b(tokenizer_json, digest_size=16)
    digest.update(rest.encode())
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token_id=special.bos_token_id,
        eos_token_id=special.eos_token_id,
        pad_token_id=special.pad_token_id,
        end_token_ids=special.end_token_ids,
        add_bos=special.add_bos,
        defaults=defaults,
        digest=digest.hexdigest(),
    )
