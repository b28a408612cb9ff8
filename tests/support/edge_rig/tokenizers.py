"""Small tokenizers of the two kinds that language models have, and models that are served with them."""

from dataclasses import replace

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.plan.codec.tokenizers import write_content
from paceline.plan.codec.welcomes import write_defaults
from paceline.plan.hashes import tokenizer_digest
from paceline.plan.sampling import GenerationDefaults
from paceline.v1 import executor_pb2
from paceline_scheduler.api.text.spelling_file import pack
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.backend import ServedModel, TokenizerSource

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CORPUS = (
    "The capital of France is Paris. Hello, hello world! STOP stop. Ünïcödé snowmen ☃☃ and 😀😀 smile; 日本語です。\n\n"
    "naïve café — “quotes” … user assistant system 0123456789 the of and to in that is was he for it with as his on be"
)


def byte_level_tokenizer() -> Tokenizer:
    """400 tokens: any text can be written, many characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def sentence_piece_tokenizer() -> Tokenizer:
    """As converted SentencePiece models have it: spaces as letters, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "é",
        "▁h",
        "el",
        "▁hel",
        "lo",
        "▁hello",
        "▁w",
        "or",
        "▁wor",
        "ld",
    ]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o"), ("▁hel", "lo"), ("▁", "w"), ("o", "r"), ("▁w", "or")]
    merges.append(("l", "d"))
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def tokenizer_source(
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_bos: bool = False,
    defaults: GenerationDefaults | None = None,
) -> TokenizerSource:
    """`eos_token` ends completions."""
    eos_token_id = None if eos_token is None else tokenizer.token_to_id(eos_token)
    bos_token_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    named = {"bos_token": bos_token, "eos_token": eos_token}
    source = TokenizerSource(
        digest="",
        json=tokenizer.to_str().encode(),
        chat_template=chat_template,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        end_token_ids=() if eos_token_id is None else (eos_token_id,),
        prefix_token_ids=(bos_token_id,) if add_bos and bos_token_id is not None else (),
        suffix_token_ids=(),
        special_tokens=tuple((name, text) for name, text in named.items() if text is not None),
        defaults=defaults or GenerationDefaults(),
    )
    return replace(source, digest=tokenizer_digest(content_of(source)))


def content_of(source: TokenizerSource) -> bytes:
    """As an executor sends it."""
    return write_content(
        executor_pb2.GetTokenizerResponse(
            tokenizer_json=source.json,
            chat_template=source.chat_template,
            bos_token_id=source.bos_token_id,
            eos_token_id=source.eos_token_id,
            end_token_ids=source.end_token_ids,
            default_sampling=write_defaults(source.defaults),
            prefix_token_ids=source.prefix_token_ids,
            suffix_token_ids=source.suffix_token_ids,
            special_tokens=dict(source.special_tokens),
            default_system_text=source.default_system_text,
            response_template=source.response_template,
            tool_use_template=source.tool_use_template,
        )
    )


def served_model(
    source: TokenizerSource | None = None, *, name: str = "tiny", max_model_len: int = 256, vocab_size: int = 400
) -> ServedModel:
    """Without a source it has the byte-level tokenizer."""
    return ServedModel(
        name=name,
        architecture="llama",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_executors=1,
        num_parameters=1000,
        quantization="",
        tokenizer=source or tokenizer_source(byte_level_tokenizer(), eos_token="<|im_end|>"),
    )


async def try_here(source: TokenizerSource, vocab_size: int) -> bytes:
    """Try a tokenizer of ours: no process is needed to confine it."""
    return pack(read_text_model(source, vocab_size).texts)
