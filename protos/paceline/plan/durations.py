"""Seconds as the message that protocols have for them. Knows its range, and not what the seconds are of.

Apart from the codec, because errors name them before all else.
"""

from google.protobuf.duration_pb2 import Duration

_MAX_SECONDS = 315_576_000_000.0  # ten thousand years: the most that a Duration holds


def write_duration(seconds: float) -> Duration:
    """Return seconds as a message; beyond its range the longest there is. Never raises: negative and NaN are none."""
    message = Duration()
    # In this order, as `max` keeps its first argument where the second one is NaN.
    message.FromNanoseconds(round(min(max(0.0, seconds), _MAX_SECONDS) * 1e9))
    return message


def read_duration(message: Duration) -> float:
    """Return the seconds of a message; never raises, since its parts are bounded by its own ranges."""
    return message.seconds + message.nanos / 1e9
