"""A tokenizer out of a Hugging Face folder: tokenizer.json and the small files beside it.

Reads JSON and jinja2 source only: no pickle, no tokenizer class, no code out of the folder.
"""

from pathlib import Path

from tokenizers import Tokenizer

from paceline.plan.values import GenerationDefaults
from paceline_executor.weights.hf.json_fields import MAX_SMALL_FILE_BYTES, JsonFields, read_bounded
from paceline_executor.weights.refusals import damaged, shown
from paceline_executor.weights.tokenizer import (
    END_TOKEN_TEXTS,
    SpecialTokens,
    TokenizerBundle,
    make_bundle,
)

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TOKEN_ID = 1 << 31


def tokenizer_from_folder(folder: Path, vocab_size: int | None = None) -> TokenizerBundle:
    """`vocab_size` is how many tokens the model embeds, where that is known.

    Raises ModelNotFoundError without a tokenizer.json, ModelCorruptError naming file and field.
    """
    path = folder / "tokenizer.json"
    data = read_bounded(path, MAX_TOKENIZER_BYTES)
    tokenizer = _parse_tokenizer(path, data)
    # Added tokens may lie beyond: that of an image, in the text model of Gemma 3.
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=False)
    if vocab_size is not None and num_tokens > vocab_size:
        raise damaged(
            path, f"it belongs to another model: it lists {num_tokens} tokens, and the model has {vocab_size}"
        )
    config = JsonFields.read_if_there(folder / "tokenizer_config.json")
    generation = JsonFields.read_if_there(folder / "generation_config.json")
    special = _special_tokens(tokenizer, config, generation)
    return make_bundle(data, _chat_template(folder, config), special, _defaults(generation))


def _parse_tokenizer(path: Path, data: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.encode("a")  # some damage shows only now
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panic is no Exception
        raise damaged(path, f"the tokenizers library refuses it ({shown(str(error))})") from error
    return tokenizer


def _token_text(fields: JsonFields, name: str) -> str | None:
    """Written as its text or as an object with the text under `content`."""
    value = fields.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text
    raise fields.fault(name, "not a token")


def _token_ids(fields: JsonFields, name: str) -> list[int]:
    """The field is one id, a list of ids, or none. They may lie beyond the tokenizer's own: models embed more than it
    knows.
    """
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in ids):
        return ids
    raise fields.fault(name, "neither a token id nor a list of them")


def _special_tokens(tokenizer: Tokenizer, config: JsonFields, generation: JsonFields) -> SpecialTokens:
    def role(name: str) -> int | None:
        text = _token_text(config, name)
        token_id = None if text is None else tokenizer.token_to_id(text)
        if text is not None and token_id is None:
            raise damaged(config.path, f"{name} {shown(text)} is not in the vocabulary")
        return token_id

    bos, eos = role("bos_token"), role("eos_token")
    listed = _token_ids(generation, "eos_token_id")
    added = tokenizer.get_added_tokens_decoder()
    found = [token_id for token_id, token in sorted(added.items()) if token.content in END_TOKEN_TEXTS]
    ends = [*([] if eos is None else [eos]), *listed, *found]
    return SpecialTokens(
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=role("pad_token"),
        end_token_ids=tuple(dict.fromkeys(ends)),
        add_bos=bos is not None and _adds_bos(tokenizer, config, bos),
    )


def _adds_bos(tokenizer: Tokenizer, config: JsonFields, bos: int) -> bool:
    """What the configuration says, else what the tokenizer's post-processor does."""
    stated = config.flag("add_bos_token")
    return tokenizer.encode("a").ids[:1] == [bos] if stated is None else stated


def _chat_template(folder: Path, config: JsonFields) -> str | None:
    """chat_template.jinja, else the template, or the one named "default", of tokenizer_config."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, MAX_SMALL_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(path, "it is not UTF-8") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise damaged(config.path, "chat_template is neither a text nor a list of named texts")


def _defaults(generation: JsonFields) -> GenerationDefaults:
    top_k = generation.number("top_k")
    try:
        return GenerationDefaults(
            temperature=generation.number("temperature"),
            top_p=generation.number("top_p"),
            top_k=None if top_k is None else int(top_k),
            min_p=generation.number("min_p"),
            repetition_penalty=generation.number("repetition_penalty"),
        )
    except ValueError as error:
        raise damaged(generation.path, f"its {error}") from error
