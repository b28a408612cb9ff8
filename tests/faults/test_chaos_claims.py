"""What metrics claim is compared with what clients saw: what differs is told, and what may differ is not."""

import pytest

from paceline_cli.chaos.claims import untrue_of_all, untrue_of_fault
from paceline_cli.chaos.comparison import Mismatches
from paceline_cli.chaos.ledger import ChaosLedger, StreamProgress
from paceline_cli.chaos.metrics import Claims, between
from paceline_cli.chaos.report import figures_of, report_fields

TIMES = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency")
PARTS = ("request_queue_time", "request_prefill_time", "request_decode_time")


def claims(is_whole=True, **values):
    """`name=value`, or `name_kind=value` for those of a kind."""
    return Claims({f"paceline_{name}": value for name, value in values.items()}, is_whole)


def recovery(kind, pause_s, **more):
    labels = f'{{kind="{kind}"}}'
    samples = {
        f"paceline_recovery_pause_seconds_count{labels}": 1.0,
        f"paceline_recovery_pause_seconds_sum{labels}": pause_s,
        f"paceline_recoveries_total{labels}": 1.0,
    }
    return Claims(samples, **{"is_whole": True, **more})


def silent_for(seconds, kind="executors-kill"):
    """The ledger of a fault after which the only stream got nothing for so long."""
    ledger = ChaosLedger(0.0)
    stream = StreamProgress("story")
    ledger.began(stream)
    ledger.arrived(stream, 1, Mismatches(), 1.0)
    ledger.open_window(kind, "", 1.0)
    ledger.arrived(stream, 1, Mismatches(), 1.0 + seconds)
    return ledger


def told(claimed, ledger, num_executors=2):
    return untrue_of_fault(claimed, ledger.current, ledger.longest_wait_s(60.0), num_executors)


@pytest.mark.parametrize(
    ("claimed", "is_true"),
    [
        (recovery("executor", 0.011), False),
        (recovery("executor", 50.66), True),
        (recovery("executor", 26.0), True),
        (recovery("executor", 58.0), False),
        (recovery("stream", 50.0), False),
        (claims(), False),
        (claims(is_whole=False), True),
        (recovery("scheduler", 58.0, is_whole=False), False),
    ],
)
def test_a_pause_is_what_clients_saw_or_is_told(claimed, is_true):
    assert bool(told(claimed, silent_for(51.0))) != is_true


def test_while_another_executor_is_left_a_pause_may_be_short():
    short = recovery("executor", 0.011)
    assert told(short, silent_for(51.0, "executor-kill")) == []
    assert told(short, silent_for(51.0, "executor-kill"), num_executors=1) == [
        "1 executors recovered, in 0.01 s together; no client got anything for 51.00 s"
    ]


def finished(num_placed_again=0):
    """The ledger of two completions of ten seconds, with 11 tokens from the second second on."""
    ledger = ChaosLedger(0.0)
    for _ in range(2):
        ledger.seen.add(0.0, 2.0, 10.0, 11, 1 + num_placed_again)
    return ledger


def requests(**changes_s):
    """What metrics say of these."""
    each_s = dict(zip(TIMES, (2.0, 8.0, 0.8, 10.0), strict=True)) | dict.fromkeys(PARTS, 1.0) | changes_s
    return {f"{name}_seconds_count": 2.0 for name in each_s} | {
        f"{name}_seconds_sum": 2 * seconds for name, seconds in each_s.items()
    }


@pytest.mark.parametrize("name", [*TIMES, *PARTS])
def test_times_beyond_those_of_every_client_are_told(name):
    assert untrue_of_all(claims(**requests()), finished()) == []
    (sentence,) = untrue_of_all(claims(**requests(**{name: 10.6})), finished())
    assert sentence == f"{name}_seconds is 10.60 s on average; no request took longer than 10.00 s"


@pytest.mark.parametrize("name", ["time_to_first_token", "inter_token_latency", "e2e_request_latency"])
def test_times_far_below_those_of_clients_are_told(name):
    (sentence,) = untrue_of_all(claims(**requests(**{name: 0.01})), finished())
    assert sentence.startswith(f"{name}_seconds adds up to 0.02 s; clients saw ")
    assert untrue_of_all(claims(is_whole=False, **requests(**{name: 0.01})), finished()) == []


@pytest.mark.parametrize(
    ("counts", "num_placed_again", "is_true"),
    [
        ({"num_preemptions_total": 48.0}, 20, True),
        ({"num_preemptions_total": 50.0}, 1, False),
        ({}, 20, False),
        ({"recoveries_total": 1.0}, 20, True),
        ({'request_success_total{finished_reason="error"}': 1.0}, 0, False),
    ],
)
def test_losses_are_those_that_clients_saw_or_are_told(counts, num_placed_again, is_true):
    found = untrue_of_all(claims(**requests(), **counts), finished(num_placed_again))
    assert bool(found) != is_true


def test_what_is_untrue_fails_the_campaign_and_is_in_the_report():
    ledger = silent_for(51.0)
    assert figures_of("", ledger.windows).is_clean
    ledger.current.untrue += told(recovery("executor", 0.011), ledger)
    assert not figures_of("", ledger.windows).is_clean
    assert report_fields(ledger.windows)["faults"][-1]["untrue_metrics"] == ledger.current.untrue


def test_claims_are_what_was_added_since_by_the_same_process_and_all_of_a_new_one():
    before = {1: {"process_start_time_seconds": 5.0, "paceline_x": 2.0}}
    same = {1: {"process_start_time_seconds": 5.0, "paceline_x": 3.0}}
    other = {1: {"process_start_time_seconds": 9.0, "paceline_x": 3.0}}
    assert (between(before, same).sum_of("x"), between(before, same).is_whole) == (1.0, True)
    assert (between(before, other).sum_of("x"), between(before, other).is_whole) == (3.0, False)
    assert not between({}, same).is_whole
