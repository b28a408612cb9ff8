"""Which files of a repository of the Hugging Face hub make up a model.

Only plain names of the repository's top level are ever chosen, and one template below it. Knows no network.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from paceline_executor.errors import ModelNotFoundError, UnsupportedModelError
from paceline_executor.weights.fetch.hub_id import HubId
from paceline_executor.weights.hf.quantised.formats import OLDER_FILES
from paceline_executor.weights.hf.safetensors_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    shard_names,
    unexplained,
    weights_file,
)
from paceline_executor.weights.refusals import UNSAFE_SUFFIXES, shown

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"),
    "additional_chat_templates/tool_use.jinja",
    *OLDER_FILES,
)
_TOKENIZER_FILE = "tokenizer.json"
_MAX_LISTED = 8


def first_files(hub_id: HubId, names: Iterable[str]) -> list[str]:
    """A GGUF file is all there is; of a folder, the index that names its other weights.

    Raises ModelNotFoundError for a choice that is not there, UnsupportedModelError for weights that are not read.
    """
    weights = _weights(hub_id, names)
    return [] if weights.endswith(".safetensors") else [weights]


def all_files(hub_id: HubId, names: Iterable[str], folder: Path, *, has_tokenizer: bool = True) -> list[str]:
    """folder: where the first files are. has_tokenizer: whether the model needs one.

    Those without which there is no model come last: who has them has all.

    Raises UnsupportedModelError where a needed one is missing, and ModelCorruptError for an index that is none.
    """
    weights = _weights(hub_id, names)
    if weights.endswith(".gguf"):
        return [weights]
    present = {name for name in names if _PLAIN_NAME.fullmatch(name) or name in _COMPANIONS}
    tokenizer = [_TOKENIZER_FILE] if has_tokenizer else []
    index = [weights] if weights.endswith(".json") else []
    needed = [CONFIG_FILE, *tokenizer, *(shard_names(folder) if index else [weights])]
    missing = [name for name in needed if name not in present]
    if missing:
        raise UnsupportedModelError(
            f"{hub_id} cannot be served by this version: it has no {shown(missing[0])}; choose another model"
        )
    companions = _COMPANIONS if has_tokenizer else ()
    return [*index, *(name for name in companions if name in present), *needed]


def _weights(hub_id: HubId, names: Iterable[str]) -> str:
    """The GGUF file, index or only file."""
    plain = sorted(name for name in names if _PLAIN_NAME.fullmatch(name))
    return (weights_file(plain) if hub_id.choice is None else None) or _gguf_file(hub_id, plain)


def _gguf_file(hub_id: HubId, names: list[str]) -> str:
    files = [name for name in names if name.endswith(".gguf")]
    choice = hub_id.choice
    if choice is None and not files:
        raise _without_weights(hub_id, names)
    found = files if choice is None else [name for name in files if _is_chosen(name, choice)]
    if len(found) == 1:
        return found[0]
    few = ", ".join(files[:_MAX_LISTED]) + (" …" if len(files) > _MAX_LISTED else "")
    state = "several GGUF files" if found else f"no GGUF file {shown(choice or '')}"
    raise ModelNotFoundError(
        f"{hub_id.repository} has {state}: give one as {hub_id.repository}:FILE.gguf; it has {few or 'none'}"
    )


def _is_chosen(name: str, choice: str) -> bool:
    """By the whole name, or by the quantisation that it ends with."""
    if choice.endswith(".gguf"):
        return name == choice
    return re.search(rf"(?:^|[-._]){re.escape(choice)}\.gguf$", name, re.IGNORECASE) is not None


def _without_weights(hub_id: HubId, names: list[str]) -> UnsupportedModelError:
    if "adapter_config.json" in names:
        return UnsupportedModelError(f"{hub_id} is an adapter, and adapters are not served; merge it into its model")
    unsafe = next((name for name in names if name.endswith(UNSAFE_SUFFIXES)), None)
    if unsafe is not None:
        reason = f"its weights are in {unsafe}, a kind of file that may contain code: convert it to safetensors, or"
    else:
        reason = f"it has neither {WEIGHTS_FILE} nor a GGUF file{unexplained(names)}:"
    return UnsupportedModelError(f"{hub_id} cannot be served by this version: {reason} choose another model")
