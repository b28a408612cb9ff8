"""What the simulation stands on: nodes that die, freeze and jump in time, and the network between them."""

import asyncio
from random import Random

import pytest

from simulation.loop import LivelockError, SimulationLoop
from simulation.network import CallEndedError, End, Network, PathState


class Net:
    """A loop with a network, a server that answers every question with its double, and a client."""

    def __init__(self):
        self.loop = SimulationLoop()
        self.network = Network(self.loop, Random(1), lambda *_: None)  # noqa: S311
        self.client, self.server = self.loop.add_node("client"), self.loop.add_node("server")
        self.answers = []
        self.network.listen(self.server, self.serve)

    async def serve(self, call):
        while True:
            call.tell(2 * await call.question())

    async def ask(self, *numbers):
        """Ask, and note each answer with when it came, and how the call ended."""
        call = self.network.call(self.client, "server", "double")
        try:
            for number in numbers:
                call.ask(number)
                self.answers.append(await call.answer())
                await asyncio.sleep(1.0)
        except CallEndedError as ended:
            self.answers.append(ended.end)

    def run(self, until_s):
        self.loop.call_at(until_s, self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def net():
    """A network, taken down afterwards."""
    net = Net()
    yield net
    net.loop.end()
    assert not net.loop.failures


def test_a_call_goes_there_and_back(net):
    net.loop.spawn(net.client, net.ask(1, 2, 3))
    net.run(5.0)
    assert net.answers == [2, 4, 6]


def test_a_killed_node_runs_nothing_more_not_even_its_cleanup(net):
    """As after kill -9: no finally, no answer; its peer finds the connection broken."""
    cleaned_up = []

    async def work():
        try:
            await asyncio.sleep(10.0)
        finally:
            cleaned_up.append(True)

    def kill():
        net.loop.kill(net.server)
        net.network.gone(net.server)

    net.loop.spawn(net.server, work())
    net.loop.spawn(net.client, net.ask(1, 2, 3))
    net.loop.call_at(0.5, kill)
    net.run(20.0)
    assert net.answers == [2, End.BROKEN]
    assert not cleaned_up


def test_nobody_listens_where_a_node_was_killed(net):
    net.loop.kill(net.server)
    net.network.gone(net.server)
    net.loop.spawn(net.client, net.ask(1))
    net.run(1.0)
    assert net.answers == [End.REFUSED]


def test_a_frozen_node_goes_on_where_it_stood(net):
    seen = []

    async def tick():
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append(asyncio.get_running_loop().time())

    net.loop.spawn(net.client, tick())
    net.loop.call_at(1.5, net.loop.freeze, net.client)
    net.loop.call_at(6.0, net.loop.thaw, net.client)
    net.run(20.0)
    assert seen == [1.0, 6.0, 7.0]


def test_a_clock_that_jumps_brings_its_own_timers_forward_and_no_others(net):
    seen = []

    async def wait(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, round(net.loop.now_s, 3)))

    net.loop.spawn(net.server, wait("server", 9.0))
    net.loop.spawn(net.client, wait("client", 3.0))
    net.loop.call_at(1.0, net.loop.set_clock, net.server, 10.0)
    net.run(20.0)
    assert seen == [("server", 1.0), ("client", 3.0)]


def test_what_is_swallowed_never_arrives_and_nothing_follows_it(net):
    path = net.network.path("client", "server")
    net.loop.spawn(net.client, net.ask(1, 2, 3))
    net.loop.call_at(0.5, lambda: setattr(path, "state", PathState.SWALLOWING))
    net.loop.call_at(3.0, net.network.open_path, path)
    net.run(10.0)
    assert net.answers == [2]
    net.network.break_path("client", "server")
    net.run(11.0)
    assert net.answers == [2, End.BROKEN]


def test_what_is_held_arrives_when_the_path_opens(net):
    path = net.network.path("client", "server")
    net.loop.spawn(net.client, net.ask(1, 2))
    net.loop.call_at(0.5, lambda: setattr(path, "state", PathState.HELD))
    net.loop.call_at(5.0, net.network.open_path, path)
    net.run(10.0)
    assert net.answers == [2, 4]


def test_a_loop_whose_time_stands_still_is_noticed():
    loop = SimulationLoop()

    def again():
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(LivelockError):
        loop.run_forever()
    loop.end()
