"""Clients as nodes of the network: the real client library, dialling whatever scheduler answers."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import cast

from paceline_client import wire
from paceline_client.addresses import Addresses
from paceline_client.config import Keepalive, Limits, Retry, Timeout
from paceline_client.connection import Connection
from paceline_client.errors import PacelineError
from paceline_client.request_run import RequestRun
from paceline_client.requests import GenerationRequest, Output, Sampling, Scheduling, Stopping, TokenIds
from paceline_client.results import Delta, Result
from simulation.loop import Node, keep_failure
from simulation.network import Call, CallEndedError, Host, Network, Site
from simulation.scenario import PlannedRequest
from simulation.schedulers import CONNECT, SESSION, SchedulerHost
from simulation.transport import SimulatedCall

_UP_TO_DATE = 0.8  # how often a name leads to where it should
_KNOW_ALL = 0.5  # how many clients know each scheduler rather than the name of the service
_SERVICE = "service"
_PATIENT = 1000  # attempts at a request that is refused: while things go wrong many are


Received = Callable[[PlannedRequest, Delta], None]
"""Hears of more of an output that has come out of the library."""
Ended = Callable[[PlannedRequest, Result | PacelineError | None], None]
"""Hears that a request is over; None: its reader left."""


class SimulatedChannel:
    """A connection to one scheduler, whichever the name of the service led to."""

    def __init__(self, network: Network, node: Node, scheduler: str) -> None:
        self._network = network
        self._node = node
        self._scheduler = scheduler
        self._calls: list[Call] = []
        self.is_ready = False
        self.why_not_ready = ""  # where something came back

    async def becomes_ready(self, seconds: float) -> bool:
        call = self._network.call(self._node, self._scheduler, CONNECT)
        try:
            async with asyncio.timeout(seconds):
                await call.answer()
        except TimeoutError:
            return False
        except CallEndedError:
            self.why_not_ready = f"{self._scheduler} does not answer"
            return False
        finally:
            call.cancel()
        self.is_ready = True
        return True

    async def what_serves(self) -> str:
        """Here everybody serves the API."""
        return ""

    def token_watch(self) -> Callable[[], bool]:
        return lambda: False

    def open_session(self) -> wire.SessionCall:
        call = self._network.call(self._node, self._scheduler, SESSION)
        self._calls.append(call)
        return cast("wire.SessionCall", SimulatedCall(call))

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()


class ClientHost(Host):
    """A process with one client, which runs what is planned for it. `schedulers` are those it may be led to."""

    def __init__(self, site: Site, schedulers: Sequence[SchedulerHost], received: Received, ended: Ended) -> None:
        super().__init__(site)
        self._next_node()
        self._schedulers = schedulers
        self._received, self._ended = received, ended
        self._retry = Retry(max_attempts=_PATIENT, draw=self._random.random)
        self._knows_all = self._random.random() < _KNOW_ALL
        self._connection = self._loop.run_as(self.node, self._connect)

    def start(self, planned: PlannedRequest) -> None:
        """Send a request when its time has come, and read what comes of it."""
        self._loop.spawn(self.node, self._run(planned)).add_done_callback(keep_failure)

    def _connect(self) -> Connection[SimulatedChannel]:
        names = [host.name for host in self._schedulers] if self._knows_all else [_SERVICE]
        return Connection(Addresses(names), dial=self._dial, retry=self._retry, keepalive=Keepalive(), limits=Limits())

    def _dial(self, address: str) -> SimulatedChannel:
        """Dial a scheduler, or the name of the service: mostly it leads to one that is ready, if there is one."""
        if address != _SERVICE:
            return SimulatedChannel(self._network, self.node, address)
        ready = [host for host in self._schedulers if host.is_ready]
        hosts = ready if ready and self._random.random() < _UP_TO_DATE else self._schedulers
        return SimulatedChannel(self._network, self.node, self._random.choice(hosts).name)

    async def _run(self, planned: PlannedRequest) -> None:
        await asyncio.sleep(planned.at_s)
        run = RequestRun(self._connection, as_request(planned), self._retry)
        num_deltas = 0
        try:
            async with aclosing(run.deltas()) as deltas:
                async for delta in deltas:
                    self._received(planned, delta)
                    num_deltas += 1
                    if planned.leaves_after is not None and num_deltas > planned.leaves_after:
                        break
        except PacelineError as error:
            self._ended(planned, error)
            return
        self._ended(planned, run.end if isinstance(run.end, Result) else None)


def as_request(planned: PlannedRequest) -> GenerationRequest:
    rules = planned.rules
    return GenerationRequest(
        prompt=TokenIds(planned.prompt),
        request_id=planned.request_id,
        tenant=planned.tenant,
        model="",
        sampling=Sampling(
            seed=planned.seed,
            n=planned.num_completions,
            frequency_penalty=rules.penalty or None,
            repetition_penalty=1 + rules.penalty if rules.penalty else None,
            logit_bias=dict([rules.bias] if rules.bias else []),
            allowed_token_ids=sorted(rules.allowed),
            bad_words=rules.bad_word or (),
        ),
        stopping=Stopping(
            max_tokens=planned.max_tokens, min_tokens=rules.min_tokens or None, stop=planned.stop or None
        ),
        output=Output(logprobs=planned.logprobs, prompt_logprobs=planned.prompt_logprobs),
        scheduling=Scheduling(),
        # As long as for a server that says nothing: here everybody is down at times, and nobody waits in vain.
        timeout=Timeout(total_seconds=planned.timeout_s, refused_seconds=10.0),
        structured=None if planned.form is None else planned.form.form,
    )
