"""What is counted for which fault."""

import pytest

from paceline_cli.chaos.comparison import Mismatches
from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, StreamProgress
from paceline_cli.chaos.report import figures_by_kind, figures_of, report_fields

CLEAN = Mismatches()


def delivering(ledger, *times):
    stream = StreamProgress("story")
    ledger.began(stream)
    for now_s in times:
        ledger.arrived(stream, 1, CLEAN, now_s)
    return stream


@pytest.mark.parametrize(
    ("before", "fault_s", "after", "pause_s"),
    [((1.0, 1.1), 1.2, (1.9, 2.0, 2.1), 0.8), ((1.0,), 1.05, (1.1, 2.0), 0.9)],
    ids=["from the token before it", "though tokens were under way"],
)
def test_a_pause_that_spans_the_fault_counts(before, fault_s, after, pause_s):
    ledger = ChaosLedger(0.0)
    stream = delivering(ledger, *before)
    window = ledger.open_window("kill", "", fault_s)
    for now_s in after:
        ledger.arrived(stream, 1, CLEAN, now_s)
    assert [round(stall, 6) for stall in window.stalls.values()] == [pause_s]


def test_a_pause_at_the_fault_is_told_from_later_ones():
    ledger = ChaosLedger(0.0)
    stream = delivering(ledger, 1.0)
    ledger.open_window("kill", "", 1.05)
    for now_s in (1.1, 1.5, 2.5):
        ledger.arrived(stream, 1, CLEAN, now_s)
    _, kill = figures_by_kind(ledger.windows)
    assert (round(kill.stall.p50, 6), round(kill.longest.p50, 6)) == (0.4, 1.0)
    (_, fault) = report_fields(ledger.windows)["faults"]
    assert (fault["stalls_seconds"], fault["longest_seconds"]) == ([0.4], [1.0])


def test_a_pause_that_does_not_end_counts_as_far_as_it_got():
    ledger = ChaosLedger(0.0)
    delivering(ledger, 1.0)
    window = ledger.open_window("kill", "", 1.5)
    ledger.close(9.0)
    assert list(window.stalls.values()) == [8.0]
    assert ledger.num_waiting == 1


def test_a_stream_that_has_not_begun_to_deliver_does_not_stall():
    ledger = ChaosLedger(0.0)
    ledger.began(StreamProgress("late"))
    window = ledger.open_window("kill", "", 1.0)
    assert (window.num_in_flight, window.stalls, ledger.num_waiting) == (0, {}, 0)


def test_pauses_that_a_request_asks_for_are_no_stalls():
    ledger = ChaosLedger(0.0)
    slow = StreamProgress("five at a time", pauses_by_itself=True)
    ledger.began(slow)
    ledger.arrived(slow, 5, CLEAN, 1.0)
    window = ledger.open_window("kill", "", 1.1)
    assert (window.num_in_flight, ledger.num_waiting) == (1, 1)
    ledger.arrived(slow, 5, CLEAN, 2.0)
    assert (window.stalls, window.longest, window.num_tokens) == ({}, {}, 5)


def test_streams_that_end_or_fail_are_not_waited_for():
    ledger = ChaosLedger(0.0)
    ends, fails, goes_on = (delivering(ledger, 1.0) for _ in range(3))
    window = ledger.open_window("kill", "", 1.1)
    ledger.done(ends, CLEAN)
    ledger.failed(fails, "GIVEN_UP", "it was given up")
    assert ledger.num_waiting == 1
    ledger.arrived(goes_on, 1, CLEAN, 1.2)
    assert ledger.num_waiting == 0
    assert (window.num_done, dict(window.failures)) == (1, {"GIVEN_UP": 1})
    assert ledger.first_failure == "story: it was given up"


def test_a_flaw_is_counted_where_it_shows_and_nothing_is_clean_then():
    ledger = ChaosLedger(0.0)
    stream = delivering(ledger, 1.0)
    ledger.open_window("kill", "", 1.1)
    ledger.arrived(stream, 1, Mismatches(num_changed=1, first="story: other"), 1.2)
    quiet, kill = figures_by_kind(ledger.windows)
    assert (quiet.kind, quiet.is_clean) == (UNDISTURBED, True)
    assert (kill.kind, kill.is_clean, kill.mismatches.num_changed) == ("kill", False, 1)


def test_a_system_that_did_not_come_back_is_not_clean():
    """Though no stream failed."""
    ledger = ChaosLedger(0.0)
    ledger.open_window("kill", "", 1.0).is_given_up = True
    assert not figures_of("all", ledger.windows).is_clean


def test_pauses_of_all_faults_of_a_kind_are_taken_together():
    ledger = ChaosLedger(0.0)
    stream = delivering(ledger, 1.0)
    for began_s, next_s in ((1.0, 1.5), (2.0, 5.5)):
        ledger.arrived(stream, 1, CLEAN, began_s)
        ledger.open_window("kill", "", began_s)
        ledger.arrived(stream, 1, CLEAN, next_s)
    _, kill = figures_by_kind(ledger.windows)
    assert (kill.num_faults, kill.num_stalls, kill.stall.p50, kill.stall.longest) == (2, 2, 2.0, 3.5)
    assert report_fields(ledger.windows)["kinds"][1]["stall_seconds"]["longest"] == 3.5
