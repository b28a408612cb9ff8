"""What a scheduler writes for later: recordings, and what it keeps on disk of tokenizers. Others may send the files."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings
from edge_rig.tokenizers import content_of
from fuzzing.target import Target, event_loop, scratch, tokenizer
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.disk_cache import AsyncDiskCache
from paceline_scheduler.errors import DivergenceError, LinkError, RecordingError
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.recording.replay import Recording, read_recording, replay
from paceline_scheduler.recording.story import Requests
from paceline_scheduler.recording.what_if import read_policy
from scheduler_rig.requests import make_request

# So that a later file begins with a cache that is written as columns.
_NUM_CACHED_TOKENS, _MAX_FILE_BYTES = 400, 2_000
_MAX_RECORDS = 200  # repeated: a changed clock may ask for any number of steps


def read_file(data: bytes) -> None:
    """Be `paceline replay` with this file."""
    path = scratch() / "recording"
    path.write_bytes(data)
    with suppress(RecordingError):
        recording = read_recording(path)
        replay(Recording(recording.header, recording.records[:_MAX_RECORDS]), [Requests()])


def _sound_recordings() -> Iterator[bytes]:
    recordings = [Recordings(is_raw=is_raw, max_file_bytes=_MAX_FILE_BYTES) for is_raw in (True, False)]
    harness = RecordedHarness(recordings, make_executor(num_blocks=200, block_size=4, max_model_len=512))
    harness.submit(make_request(_NUM_CACHED_TOKENS, 3), make_request(20, 2, num_logprobs=2))
    harness.finish()
    harness.succeed()
    for each in recordings:
        yield from each.files()


class _CacheOf(AsyncDiskCache):
    """Has one file, whatever is asked for."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    async def load(self, name: str) -> bytes | None:
        del name
        return self._content


class _Executor:
    """Has the tokenizer, should the one on disk be no use."""

    async def get_tokenizer(self, timeout_s: float) -> bytes:
        del timeout_s
        return content_of(tokenizer())


def find_tokenizer(data: bytes) -> None:
    """Be a scheduler that finds this in its cache."""
    connection: Any = _Executor()
    store = TokenizerStore(_prepare, _CacheOf(data))
    with suppress(LinkError, DivergenceError):
        found = event_loop().run_until_complete(store.get(tokenizer().digest, 400, connection))
        assert found.digest == tokenizer().digest


async def _prepare(source: TokenizerSource, vocab_size: int) -> None:
    read_text_model(source, vocab_size)


def read_policies(data: bytes) -> None:
    """Be `paceline replay --policy` with this."""
    with suppress(RecordingError):
        read_policy("{" + data.decode("utf-8", "replace").replace("\0", ""), CoreLimits())


TARGETS = (
    Target("recordings", read_file, _sound_recordings),
    Target("tokenizer-cache", find_tokenizer, lambda: (content_of(tokenizer()),)),
    Target("replay-policy", read_policies, lambda: (b'"itl_budget_s": 0.1, "max_num_queued_reqs": 7}',)),
)
