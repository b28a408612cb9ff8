"""Files of recordings. Apart from the other targets, because sound ones need a harness around a core."""

from collections.abc import Iterator
from contextlib import suppress

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings
from fuzzing.target import Target
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording import wire
from paceline_scheduler.testing.requests import make_request

# So that a later file begins with a cache that is written as columns.
_NUM_CACHED_TOKENS, _MAX_FILE_BYTES = 400, 2_000


def read_recording(data: bytes) -> None:
    """Be a replay of this file."""
    with suppress(RecordingError):
        for _ in wire.decode(data):
            pass


def _sound_recordings() -> Iterator[bytes]:
    recordings = [Recordings(is_raw=is_raw, max_file_bytes=_MAX_FILE_BYTES) for is_raw in (True, False)]
    harness = RecordedHarness(recordings, make_executor(num_blocks=200, block_size=4, max_model_len=512))
    harness.submit(make_request(_NUM_CACHED_TOKENS, 3))
    harness.finish()
    harness.succeed()
    for each in recordings:
        yield from each.files()


TARGETS = (Target("recording", read_recording, _sound_recordings),)
