"""Seconds as the message that protocols have for them. Knows its range, and not what the seconds are of."""

from google.protobuf.duration_pb2 import Duration

_MAX_S = 315_576_000_000.0  # ten thousand years: the most that the message holds


def duration(seconds: float) -> Duration:
    """Return the message; what is beyond its range is the longest there is. Never raises: negative and NaN are none."""
    message = Duration()
    # In this order, as `max` keeps its first argument where the second one is NaN.
    message.FromNanoseconds(round(min(max(0.0, seconds), _MAX_S) * 1e9))
    return message


def seconds(message: Duration) -> float:
    """Return what the message says; never raises, since its parts are bounded by its own ranges."""
    return message.seconds + message.nanos / 1e9
