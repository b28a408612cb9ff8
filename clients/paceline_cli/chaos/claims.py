"""What the schedulers' metrics claim of times and losses, beside what clients saw of them.

Compared are, after each fault, `recovery_pause_seconds` and `recoveries_total`; at the end `num_preemptions_total`,
`request_success_total` of errors, and the times of requests: `time_to_first_token`, `inter_token_latency`,
`request_time_per_output_token`, `e2e_request_latency` and the queue, prefill and decode times, which are parts of it.
Times of steps, planning and drafts are an executor's own: no client sees them.

A metric may say at most what clients saw, and 0.5 s more; and at least half of it, less 0.5 s: between them lie the
wire, a first step, and clients that are busy themselves. Preemptions may be a tenth and four more than clients saw.
Of a scheduler that died only what others said is known: then nothing is asked to be there, and nothing may be too much.
"""

from paceline_cli.chaos.faults import FaultKind
from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, FaultWindow, SeenTimes
from paceline_cli.chaos.metrics import Claims

SLACK_S = 0.5
LEAST_SHARE = 0.5
SLACK_REQUESTS = 4
_SHARE_ENDED_MEANWHILE = 0.1  # by a stop text, before they were placed again
# Where only these were done nothing but a preemption or a loss places a request of the load again.
_ONLY_EXECUTORS = {UNDISTURBED, *(kind for kind in FaultKind if kind.startswith(("executor", "rank")))}


def untrue_of_fault(claims: Claims, window: FaultWindow, longest_wait_s: float, num_executors: int) -> list[str]:
    """What is claimed of one fault, over by now, that is not what clients saw of it: sentences."""
    found = []
    for kind in ("stream", "executor", "scheduler"):
        number = claims.sum_of("recovery_pause_seconds_count", f'kind="{kind}"')
        pauses_s = claims.sum_of("recovery_pause_seconds_sum", f'kind="{kind}"')
        if pauses_s > number * (longest_wait_s + SLACK_S):
            what = f"{number:.0f} recoveries of a {kind} took {pauses_s:.2f} s together"
            found.append(f"{what}; no client waited longer than {longest_wait_s:.2f} s")
    nobody_left = window.kind == FaultKind.EXECUTORS_KILL or (
        window.kind in {FaultKind.EXECUTOR_KILL, FaultKind.RANK_KILL} and num_executors == 1
    )
    least_s = LEAST_SHARE * window.silence_seconds - SLACK_S
    if claims.is_whole and nobody_left and window.num_in_flight and least_s > 0:
        pauses_s = claims.sum_of("recovery_pause_seconds_sum")
        number = claims.sum_of("recoveries_total", 'kind="executor"')
        if pauses_s < least_s or not number:
            what = f"{number:.0f} executors recovered, in {pauses_s:.2f} s together"
            found.append(f"{what}; no client got anything for {window.silence_seconds:.2f} s")
    return found


def untrue_of_all(claims: Claims, ledger: ChaosLedger) -> list[str]:
    """The same of all requests, once the last has ended."""
    seen, found = ledger.seen, []
    for name, seen_s in _times_of(seen).items() if seen.num_completions else ():
        mean_s, number = claims.mean_s(name), claims.sum_of(f"{name}_seconds_count")
        if mean_s > seen.longest_s + SLACK_S:
            found.append(
                f"{name}_seconds is {mean_s:.2f} s on average; no request took longer than {seen.longest_s:.2f} s"
            )
        if seen_s is None or not claims.is_whole:
            continue
        least_s = LEAST_SHARE * seen_s - SLACK_S * seen.num_completions
        if claims.sum_of(f"{name}_seconds_sum") < least_s or (seen_s and not number):
            claimed_s = claims.sum_of(f"{name}_seconds_sum")
            found.append(f"{name}_seconds adds up to {claimed_s:.2f} s; clients saw {seen_s:.2f} s")
    num_preempted, num_recoveries = claims.sum_of("num_preemptions_total"), claims.sum_of("recoveries_total")
    num_errors = claims.sum_of("request_success_total", 'finished_reason="error"')
    if claims.is_whole and all(window.kind in _ONLY_EXECUTORS for window in ledger.windows):
        number = seen.num_placed_again
        is_more = num_preempted > number * (1 + _SHARE_ENDED_MEANWHILE) + SLACK_REQUESTS
        if is_more or (number > SLACK_REQUESTS and not num_preempted + num_recoveries):
            what = f"{num_preempted:.0f} requests were preempted, {num_recoveries:.0f} losses survived"
            found.append(f"{what}; clients saw requests placed again {number} times")
    if num_errors and not sum(window.num_failed for window in ledger.windows):
        found.append(f"{num_errors:.0f} requests ended with errors; clients saw none")
    return found


def _times_of(seen: SeenTimes) -> dict[str, float | None]:
    """By metric what clients saw of it in all; None where it is a part of something that they saw."""
    return {
        "time_to_first_token": seen.first_token_s,
        "inter_token_latency": seen.between_tokens_s,
        "request_time_per_output_token": seen.per_token_s,
        "e2e_request_latency": seen.whole_s,
        "request_queue_time": None,
        "request_prefill_time": None,
        "request_decode_time": None,
    }
