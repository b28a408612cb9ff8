"""Settings refuse what cannot be meant, and pauses between attempts grow as promised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client import Keepalive, Limits, Retry, Timeout, Tls


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Timeout(connect_seconds=0), "connect_seconds"),
        (lambda: Timeout(call_seconds=-1), "call_seconds"),
        (lambda: Timeout(total_seconds=float("nan")), "total_seconds"),
        (lambda: Retry(max_attempts=0), "max_attempts"),
        (lambda: Retry(multiplier=0.5), "multiplier"),
        (lambda: Retry(jitter=1), "jitter"),
        (lambda: Retry(max_outage_seconds=0), "max_outage_seconds"),
        (lambda: Keepalive(heartbeat_seconds=1, silence_seconds=1.5), "silence_seconds"),
        (lambda: Limits(max_buffered_tokens=0), "max_buffered_tokens"),
        (lambda: Tls(private_key=b"key"), "certificate_chain"),
        (lambda: Tls(root_certificates=b"roots", folder="x"), "folder"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_pauses_grow_by_half_from_100_ms_to_5_s():
    retry = Retry(draw=lambda: 0.5)
    pauses = [retry.delay_seconds(n) for n in (1, 2, 3, 100)]
    assert pauses == pytest.approx([0.1, 0.15, 0.225, 5.0])


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_no_pause_leaves_its_bounds(num_failures, drawn):
    """Between 80 ms and 5 s, whatever is drawn and however often it failed."""
    assert 0.08 <= Retry(draw=lambda: drawn).delay_seconds(num_failures) <= 5.0
