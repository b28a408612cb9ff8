"""One of the two models of a validation in a process of its own, so that only one is in memory at a time.

The base leaves in a folder what it predicts, the candidate then how far it is off. Refuses to know verdicts.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline_executor.config import Config, RunnerKind
from paceline_executor.errors import LimitError, NotComparableError, ProbeTextError, ShortMemoryError
from paceline_executor.start.opening import Opened, ProgressLog, open_model
from paceline_executor.validation.texts import MAX_ANSWERS, NUM_GIVEN, Window, prose, read_probes, windows

_WINDOW_TOKENS = 512
_REQUEST, _BASE, _RESULT = "request.json", "base.json", "result.json"


class ValidationRole(enum.Enum):
    BASE = "validate-base"
    CANDIDATE = "validate-candidate"


def validate(config: Config, role: ValidationRole, folder: Path) -> None:
    """Reads request.json there: `data`, a path or null; `num_tokens` of each text at most; `now`.

    Before there is a base a candidate is only opened: one that cannot be read need not wait for the base.

    Raises what loading does, ProbeTextError, NotComparableError.
    """
    if config.runner is RunnerKind.SIMULATED:
        raise LimitError("--runner simulated has no model to validate: leave it out")
    config = replace(config, max_num_seqs=MAX_ANSWERS, max_num_batched_tokens=_WINDOW_TOKENS)
    progress = ProgressLog()
    opened = open_model(config, progress)
    if role is ValidationRole.CANDIDATE and not (folder / _BASE).exists():
        return
    base = None if role is ValidationRole.BASE else json.loads((folder / _BASE).read_text())
    size = min(_WINDOW_TOKENS, opened.checkpoint.config.max_model_len)
    if base is not None:
        _check_comparable(opened, size, base)
        size = base["size"]
    texts = _texts(json.loads((folder / _REQUEST).read_text()), opened, size)
    if base is not None and base["texts"] != json.loads(json.dumps(texts)):
        raise NotComparableError("the tokenizers differ: they make other token ids of the same text")

    from paceline_executor.start.loading import load  # with torch, which takes seconds to import
    from paceline_executor.validation.side import Side

    loaded = load(config)
    if loaded.description.limits.max_model_len < size:
        raise ShortMemoryError(f"the KV cache holds less than {size} tokens: raise --kv-cache-memory or free memory")
    side = Side(loaded, size, folder, progress)
    said = loaded.description
    description = {"model": said.model, "quantization": said.quantization, "computed": config.quantization.value}
    description |= {"kv_cache": said.kv_dtype, "device": said.device}
    if base is None:
        answered = {name: side.predict(name, cut) for name, cut in texts.items()}
        template = opened.tokenizer.chat_template
        kept = {"texts": texts, "size": size, "chat_template": template, "answers": answered, "base": description}
        (folder / _BASE).write_text(json.dumps(kept))
    else:
        found = {name: side.compare(name, cut, base["answers"][name]) for name, cut in texts.items()}
        result = {"base": base["base"], "candidate": description, "texts": found}
        (folder / _RESULT).write_text(json.dumps(result))
    progress.log("validate", "done", 1.0)


def _texts(request: Mapping[str, Any], opened: Opened, size: int) -> dict[str, list[Window]]:
    probes = {} if request["data"] is None else {"data": read_probes(Path(request["data"]))}
    now, found = datetime.fromisoformat(request["now"]), {}
    for name, of_name in (probes | {"prose": prose()}).items():
        cut = windows(of_name, opened.tokenizer, size, request["num_tokens"], now)
        found[name] = [window for window in cut if len(window) > NUM_GIVEN]
        if not found[name]:
            raise ProbeTextError(f"no text of {request['data']} has more than {NUM_GIVEN} tokens: give more text")
    return found


def _check_comparable(opened: Opened, size: int, base: Mapping[str, Any]) -> None:
    if opened.tokenizer.chat_template != base["chat_template"]:
        raise NotComparableError("the chat templates differ, so prompts would: take the base's")
    if size < base["size"]:
        raise NotComparableError(f"it takes {size} tokens at most, and the base {base['size']} or more")
