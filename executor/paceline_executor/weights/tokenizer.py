"""All that turning text into token ids and back needs, in one value that can be sent to another process."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from paceline.plan.values import GenerationDefaults

# With these chat models end a turn, a message or a document. A model may emit any of several (SmolLM2: <|im_end|> after
# a turn, <|endoftext|> after a document), and its file names only one as "eos".
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


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Each within the vocabulary; None where the model has none."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: tuple[int, ...]  # any of them ends a generation; eos first, no id twice
    add_bos: bool  # a plain-text prompt starts with bos; a chat template has its own


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Encode with `add_special_tokens=False` and put `bos_token_id` first where `add_bos` says so: a post-processor
    inside `tokenizer_json` is not to be relied on. Texts of special tokens, such as <|im_start|>, encode to their
    single ids.
    """

    tokenizer_json: bytes  # as the tokenizers library serialises itself
    chat_template: str | None  # jinja2 source, untrusted
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    end_token_ids: tuple[int, ...]
    add_bos: bool
    defaults: GenerationDefaults
    digest: str  # hex of a 128-bit hash over all of the above


def with_defaults(bundle: TokenizerBundle, defaults: GenerationDefaults) -> TokenizerBundle:
    """It has another digest."""
    special = SpecialTokens(**{part.name: getattr(bundle, part.name) for part in fields(SpecialTokens)})
    return make_bundle(bundle.tokenizer_json, bundle.chat_template, special, defaults)


def make_bundle(
    tokenizer_json: bytes, chat_template: str | None, special: SpecialTokens, defaults: GenerationDefaults
) -> TokenizerBundle:
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
