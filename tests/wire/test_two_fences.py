"""The executor's fence and the simulator's were written apart; whatever happens to them, they rule the same.

What the simulation proves about the one in production then holds for the one that the scheduler's tests attach to.
"""

from dataclasses import astuple
from random import Random

import pytest

from paceline_executor.errors import EpochEndedError, LineFullError, TermSupersededError
from paceline_executor.link import fence as production
from paceline_scheduler.simulator import fence as simulated

LEASE, RETURN, MAX_WAITING = 10, 2, 2  # both fences take any unit of time
STANDINGS = {
    TermSupersededError: simulated.Standing.SUPERSEDED,
    EpochEndedError: simulated.Standing.REPLACED,
    LineFullError: simulated.Standing.TURNED_AWAY,
}


def history(random, num_events):
    """Events such as a busy executor sees: many arrivals, of all ranks; streams that speak, leave and fall silent."""
    num_streams, highest_term = 0, 1
    for _ in range(num_events):
        match random.choices(("arrive", "hear", "leave", "pass time", "renew"), (4, 6, 2, 6, 0.3))[0]:
            case "arrive":
                num_streams += 1
                term = random.randint(max(1, highest_term - 1), highest_term + 1)
                highest_term = max(highest_term, term)
                approach = random.choices(list(simulated.Approach), (5, 1))[0]
                yield "arrive", term, random.choice("abc"), approach
            case "hear" | "leave" as kind if num_streams:
                yield kind, random.randint(max(1, num_streams - 5), num_streams)
            case "pass time":
                yield "pass time", random.choice((1, 1, 1, 2, 3, 9, 10))
            case "renew":
                yield ("renew",)


class BothFences:
    """The two, told the same things at the same times."""

    def __init__(self) -> None:
        self.production = production.Fence(production.FenceTimes(LEASE, RETURN), MAX_WAITING)
        self.simulated = simulated.Fence(LEASE, RETURN, MAX_WAITING)
        self.now = 0
        self.num_streams = 0

    def tell(self, kind, *details):
        """Let something happen; returns what each makes of it, in the same words."""
        ours, theirs = self.production, self.simulated
        match kind:
            case "arrive":
                self.num_streams += 1
                term, scheduler_id, approach = details
                who = term, scheduler_id, f"{scheduler_id}:{self.num_streams}"
                how = production.Approach(approach.value)
                verdicts = ours.arrive(self.num_streams, production.Claim(*who), how, self.now)
                rulings = theirs.arrive(self.num_streams, simulated.Claim(*who), approach, self.now)
            case "hear" | "leave":
                verdicts = getattr(ours, kind)(*details, self.now)
                rulings = getattr(theirs, kind)(*details, self.now)
            case "renew":
                ours.renew(self.now)
                theirs.renew(self.now)
                verdicts, rulings = (), ()
            case "pass time":
                self.now += details[0]
                verdicts, rulings = ours.advance(self.now), theirs.look(self.now)
        return [ruling for verdict in verdicts for ruling in _rulings(verdict)], list(rulings)

    def check_states(self):
        """Both know the same driver, epoch, term and line."""
        ours, theirs = self.production, self.simulated
        driver = None if theirs.driver_id is None else astuple(theirs.claim)
        assert driver == (ours.holder and astuple(ours.holder))
        assert ours.epoch == theirs.epoch
        assert ours.highest_term == theirs.highest_term
        assert ours.num_waiting == theirs.num_waiting


def _rulings(verdict):
    """What the simulator's fence would say for a verdict of the executor's."""
    match verdict:
        case production.Accepted(stream_id, _, displaced):
            if displaced is not None:
                yield simulated.Ruling(displaced, simulated.Standing.DISPLACED)
            yield simulated.Ruling(stream_id, simulated.Standing.DRIVES)
        case production.Waits(stream_id):
            yield simulated.Ruling(stream_id, simulated.Standing.WAITS)
        case production.Refused(stream_id, error):
            yield simulated.Ruling(stream_id, STANDINGS[type(error)])


@pytest.mark.parametrize("seed", range(20))
def test_two_fences_rule_the_same(seed):
    """Equal verdicts in equal order, and the same driver, epoch, term and line afterwards."""
    random = Random(seed)  # noqa: S311 - events, no secrets
    for _ in range(20):
        both = BothFences()
        for event in history(random, 80):
            verdicts, rulings = both.tell(*event)
            assert verdicts == rulings
            both.check_states()
