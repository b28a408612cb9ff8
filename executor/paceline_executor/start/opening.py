"""Finding and opening the configured model: its files, its names, its tokenizer, and how far that is.

Refuses to know devices and memory.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import structlog

from paceline.bytes_tokenizer import CHAT_TEMPLATE, END_TOKEN_IDS, VOCAB_SIZE, make_bytes_tokenizer
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.texts import MAX_NAME_BYTES, readable
from paceline_executor.config import Config, LoadFormat
from paceline_executor.rows.forms import FormMasker
from paceline_executor.weights import (
    Checkpoint,
    FetchOptions,
    FetchProgress,
    load_dummy,
    load_model,
    resolve_model,
)
from paceline_executor.weights.fetch.known_models import KNOWN_MODELS, KnownModel, list_known_models
from paceline_executor.weights.sharded import check_degree
from paceline_executor.weights.shares import shares_whole_experts
from paceline_executor.weights.tokenizer import SpecialTokens, TokenizerBundle, make_bundle

_MIN_EVENT_S = 0.5
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")  # a commit in the cache of the Hugging Face hub


class ProgressLog:
    """Logs when a phase of loading begins and ends, and at most twice a second between."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = structlog.get_logger()
        self._clock_s = clock_s
        self._last = ("", "")
        self._last_s = 0.0

    def fetch(self, progress: FetchProgress) -> None:
        fraction = progress.num_bytes / progress.total_bytes if progress.total_bytes else 0.0
        self.log("model_fetch", progress.phase.value, fraction)

    def log(self, event: str, phase: str, fraction: float) -> None:
        now_s = self._clock_s()
        if (event, phase) == self._last and fraction < 1 and now_s - self._last_s < _MIN_EVENT_S:
            return
        self._last, self._last_s = (event, phase), now_s
        self._log.info(event, phase=phase, fraction=round(fraction, 3))


class NoProgress(ProgressLog):
    """Of a rank that is not the first, which tells of all."""

    def log(self, event: str, phase: str, fraction: float) -> None:  # noqa: ARG002
        return


@dataclass(frozen=True, slots=True)
class Opened:
    """Its headers are read and its weights are not."""

    path: Path
    checkpoint: Checkpoint
    tokenizer: TokenizerBundle


def forms_of(tokenizer: TokenizerBundle, vocab_size: int) -> FormMasker | None:
    """None where no token ends an output."""
    if not tokenizer.end_token_ids:
        return None
    return FormMasker(tokenizer.tokenizer_json, tokenizer.end_token_ids, vocab_size)


def open_model(config: Config, progress: ProgressLog) -> Opened:
    """Fetches it unless it is here. Raises ModelError, and LimitError for a number of ranks that cannot share it."""
    path = resolve_model(
        config.model,
        cache_dir=config.cache_dir,
        on_progress=progress.fetch,
        options=FetchOptions(config.revision, config.hub_endpoint, config.offline),
    )
    structlog.get_logger().info("model", path=str(path))
    progress.log("model_load", "reading", 0.0)
    opened = read_model(config, path)
    model = opened.checkpoint.config
    if config.tensor_parallel_size > 1 and model.experts is not None:
        each_has = "some experts" if shares_whole_experts(model) else "a part of each expert"
        structlog.get_logger().info("experts_shared", each_rank_has=each_has)
    return opened


def read_model(config: Config, path: Path) -> Opened:
    """Raises as `open_model` does."""

    def accept(checkpoint: Checkpoint) -> None:
        check_degree(checkpoint, config.tensor_parallel_size)

    if config.load_format is LoadFormat.DUMMY:
        dummy, own = load_dummy(path, accept)
        return Opened(path, dummy, own or simulated_tokenizer(dummy.config.vocab_size))
    checkpoint, tokenizer = load_model(path, accept)
    known = KNOWN_MODELS.get(config.model) or next((model for model in list_known_models() if model.is_at(path)), None)
    return Opened(path, checkpoint, tokenizer if known is None else recommend(known, tokenizer))


def recommend(known: KnownModel, tokenizer: TokenizerBundle) -> TokenizerBundle:
    """Adds what the model's own file does not say."""
    defaults = known.defaults if tokenizer.defaults == GenerationDefaults() else tokenizer.defaults
    return replace(tokenizer, defaults=defaults, default_system_text=known.default_system_text)


def served_name(config: Config, path: Path) -> str:
    """The configured name, else the known one or that on the hub, else that of the file or folder."""
    if config.served_model_name is not None:
        return config.served_model_name
    is_fetched = path != Path(config.model).expanduser()
    if config.model in KNOWN_MODELS or is_fetched:
        return config.model
    if not path.is_dir():
        return readable(path.stem, MAX_NAME_BYTES)
    folder = path.resolve()
    snapshot = _SNAPSHOT.search(str(folder))
    return readable(folder.name if snapshot is None else snapshot[1].replace("--", "/"), MAX_NAME_BYTES)


@cache
def simulated_tokenizer(vocab_size: int = VOCAB_SIZE) -> TokenizerBundle:
    special = SpecialTokens(None, END_TOKEN_IDS[0], END_TOKEN_IDS)
    return make_bundle(make_bytes_tokenizer(vocab_size), CHAT_TEMPLATE, special, GenerationDefaults())
