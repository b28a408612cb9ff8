"""What a client gets of its request, after crashes, broken streams, lost executors and cancels.

One request of three tokens, one or two schedulers, two executors. The product's own are each scheduler's `Core` with
all its rules, and each executor's rows and engine, audited. Written here are the client, which does all it can, and
what lies between: calls, plan streams, and who drives an executor, which `attach` is about.
"""

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from both_sides.audited import VOCAB_SIZE, make_executor
from exhaustive.clockwork import LATE, Budget, Clockwork, Do, Fault
from exhaustive.gen import Gen
from exhaustive.resume_parts import LENGTH, REQUEST, Call, Client, End, Host, Link, Scheduler, World
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import BatchPlan, FinishReason, StepResult
from paceline_executor.testing.hash_runner import HashRule
from paceline_scheduler.core.events import (
    BeginAnew,
    Cancel,
    Detach,
    DrainExecutor,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExpectExecutors,
    ReplyT,
    Resume,
    StepFinished,
    StreamEnded,
    Tick,
    UndrainExecutor,
)
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.live import RESUME_WINDOW_S, LiveRequest
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.request import ResumePoint
from paceline_scheduler.errors import (
    DivergenceError,
    RequestFailedError,
    RequestRefusedError,
    ResumeMismatchError,
    UnknownRequestError,
)

CRASH, CUT, PLAN_CUT, LOSS, MOVE, CANCEL, DISPLACE = "crash", "cut", "plan_cut", "loss", "move", "cancel", "displace"
LATE_S = (0.03, 0.1, RESUME_WINDOW_S + 1)
_STEP_S = 0.01
_AGAIN_S = 0.007  # before somebody attaches again
_LATER_S = 0.02
_BACK_S = (0.02, 0.5)  # before an executor is looked for that was taken for lost
_ENDING_S = 12
_ADDRESSES = ("executor 1", "executor 2")


class ResumeWorld(Clockwork):
    """A client, schedulers, executors, and what is on its way between them."""

    def __init__(self, gen: Gen, budget: Budget, world: World) -> None:
        super().__init__(gen, budget, LATE_S)
        self.world = world
        self.is_excused = False  # something was lost that a client without its tokens cannot do without
        self.rules: list[HashRule] = []
        self.client = Client()
        self._handles = itertools.count(1)
        self.hosts = {address: Host(address, make_executor(max_num_rows=2, num_blocks=8)) for address in _ADDRESSES}
        self.schedulers = [Scheduler(name) for name in "AB"[: world.num_schedulers]]
        for host in self.hosts.values():
            self._restart(host)
        for standby in self.schedulers[1:]:
            standby.is_standby = True
        self._boot(self.schedulers[0])
        self.later(_AGAIN_S, self._attach_client)
        self.every(5.0, self._tick)

    # The client

    def _attach_client(self) -> None:
        client = self.client
        if client.end is not None or client.call is not None or client.wants_none:
            return
        scheduler = next((each for each in self.schedulers if not each.is_standby and each.links), None)
        if scheduler is None:
            self.later(_AGAIN_S, self._attach_client)
            return
        client.attachment += 1
        held = np.array(client.held, dtype=np.int32)
        prior = held if self.world.has_prior else None
        point = ResumePoint(len(held), rolling_hash(HASH_START, held), client.last_attempt, prior)
        call = client.call = Call(scheduler, scheduler.process, next(self._handles))
        request = replace(REQUEST, handle=call.handle, attachment=client.attachment, point=point)
        self.tell(f"the client attaches to {scheduler.name}, {client.attachment}, holding {client.held}")
        seconds = self._up(call, lambda: self._gate(call, Resume((request,))))
        self.is_excused |= seconds > RESUME_WINDOW_S

    def _up(self, call: Call, do: Do) -> float:
        def arrives() -> None:
            if call.scheduler.process == call.process:
                do()
            elif call.is_served:
                self._end_call(call)

        return self.send(f"call {call.handle}, up", arrives)

    def _down(self, call: Call, do: Do) -> None:
        def arrives() -> None:
            if call.is_open:
                do()

        self.send(f"call {call.handle}, down", arrives)

    def _take(self, offset: int, tokens: list[int], attempt: int) -> None:
        client = self.client
        self.tell(f"the client gets {tokens} of attempt {attempt}")
        self.require(offset == len(client.held), "the client is told what follows what it holds")
        for token in tokens:
            context = [*REQUEST.prompt_token_ids.tolist(), *client.held]
            drawn = {rule.next_token(context, REQUEST.sampling.seed, len(client.held)) for rule in self.rules}
            self.require(token in drawn, "each token is computed from exactly the tokens that the client holds")
            client.held.append(token)
        client.last_attempt = max(client.last_attempt, attempt)

    def _hear_end(self, call: Call, end: End | None) -> None:
        """None: it is to try again."""
        call.is_open = False
        client = self.client
        if client.call is not call:
            return
        client.call = None
        if end is None:
            self.later(_AGAIN_S, self._attach_client)
            return
        self.tell(f"the client has {end.value}")
        if end is End.WHOLE:
            self.require(len(client.held) == LENGTH, "the end comes behind all tokens")
        self.require(end is not End.REFUSED or self.is_excused, "a client is refused only if something was lost")
        client.end = end

    def _cancel(self) -> None:
        """The caller wants no more of it: hang up, and cancel by key."""
        client, call = self.client, self.client.call
        client.wants_none, client.call = True, None
        if call is not None:
            self._hang_up(call)
        self._cancel_anywhere()

    def _cancel_anywhere(self) -> None:
        scheduler = next((each for each in self.schedulers if not each.is_standby and self._is_open(each)), None)
        if scheduler is None:
            self.later(_AGAIN_S, self._cancel_anywhere)
            return
        self.client.end = End.CANCELLED
        with suppress(UnknownRequestError):
            self._feed(scheduler, Cancel(REQUEST.key))

    def _hang_up(self, call: Call) -> None:
        call.is_open = False
        self._up(call, lambda: self._end_call(call))

    # Schedulers and clients

    def _is_open(self, scheduler: Scheduler) -> bool:
        return scheduler.core.state.executors.is_synced and bool(scheduler.links)

    def _gate(self, call: Call, resume: Resume) -> None:
        """Clients are answered when it is known what all executors run."""
        if call not in call.scheduler.opened:
            call.scheduler.opened.append(call)
        if self._is_open(call.scheduler):
            self._answer(call, resume)
        else:
            call.scheduler.waiting.append(lambda: self._gate(call, resume))

    def _answer(self, call: Call, resume: Resume) -> None:
        if not call.is_served:
            return
        scheduler = call.scheduler
        try:
            (resumed,) = self._feed(scheduler, resume)
        except ResumeMismatchError:
            self._close_call(call, End.REFUSED)
            return
        except RequestRefusedError as error:
            self.require(call is not self.client.call, f"the newest attachment never gives way: {error}")
            self._close_call(call, None)
            return
        for before in [each for each in scheduler.calls.values() if each is not call]:
            self.require(before is not self.client.call, "the newest attachment never gives way")
            self._close_call(before, None)
        scheduler.calls[call.handle] = call
        if resumed.outputs is not None:
            self._deliver(scheduler, resumed.outputs)

    def _deliver(self, scheduler: Scheduler, outputs: TokenOutputs) -> None:
        start = 0
        for index, handle in enumerate(outputs.handles):
            end = start + int(outputs.num_tokens[index])
            call = scheduler.calls.get(handle)
            if call is not None:
                told = int(outputs.offsets[index]), outputs.token_ids[start:end].tolist(), int(outputs.attempts[index])
                self._down(call, partial(self._take, *told))
                notice = outputs.finishes.get(handle)
                if notice is not None:
                    self._close_call(call, End.CANCELLED if notice.reason == FinishReason.CANCELLED else End.WHOLE)
            start = end

    def _close_call(self, call: Call, end: End | None) -> None:
        call.is_served = False
        call.scheduler.calls.pop(call.handle, None)
        self._down(call, lambda: self._hear_end(call, end))

    def _end_call(self, call: Call) -> None:
        """The scheduler sees that the client has gone, perhaps from a call that is over."""
        if call.is_served:
            self._close_call(call, None)
        scheduler = call.scheduler
        if scheduler.process == call.process:
            self._feed(scheduler, Detach(call.handle))
            live = scheduler.live
            is_heard = live is None or live.detached_until_s is None or live.request.handle not in scheduler.calls
            self.require(is_heard, "who listens is not taken for gone because of an earlier stream")

    # Schedulers and executors

    def _boot(self, scheduler: Scheduler, late: str = "") -> None:
        """One of the executors may answer late."""
        self._feed(scheduler, ExpectExecutors(_ADDRESSES))
        for address in _ADDRESSES:
            self._seek(scheduler, address, _AGAIN_S + _LATER_S * (address == late))

    def _seek(self, scheduler: Scheduler, address: str, seconds: float) -> None:
        process = scheduler.process
        self.later(seconds, lambda: self._attach(scheduler, address) if scheduler.process == process else None)

    def _attach(self, scheduler: Scheduler, address: str) -> None:
        """Attach where nobody drives, unless it does already."""
        host, link = self.hosts[address], scheduler.links.get(address)
        if scheduler.is_standby or (link is not None and link.is_open and link is host.link):
            return
        other = host.link
        if other is not None and other.is_open and other.scheduler is not scheduler and other.is_of_now:
            self._seek(scheduler, address, _BACK_S[1])
            return
        self._attach_anyway(scheduler, address)

    def _attach_anyway(self, scheduler: Scheduler, address: str) -> None:
        host = self.hosts[address]
        if host.link is not None:
            host.link.is_open = False
        host.link = scheduler.links[address] = Link(scheduler, scheduler.process, address)
        description, snapshot = host.executor.attach(address)
        self.tell(f"{scheduler.name} attaches to {address}: {_rows(snapshot)}")
        before = scheduler.live
        known = None if before is None else (before.attempt, _output(scheduler, before))
        self._feed(scheduler, ExecutorAttached(description, snapshot))
        if before is not None and known is not None:
            self._check_choice(scheduler, address, snapshot, before, *known)

    def _check_choice(
        self,
        scheduler: Scheduler,
        address: str,
        snapshot: Snapshot,
        before: LiveRequest,
        attempt: int,
        output: list[int],
    ) -> None:
        after = scheduler.core.state.requests.by_key(REQUEST.key)
        is_here = after is not None and after.held is not None and after.held.address == address
        for seen in snapshot.rows:
            if seen.row is None or seen.released is not None:
                continue
            is_told = before.detached_until_s is None
            fits = not is_told or seen.output_token_ids[: len(output)].tolist() == output
            self.require(not is_here or seen.attempt >= attempt, "a lower attempt takes no row's place")
            self.require(is_here or seen.attempt <= attempt or not fits, "of two rows the higher attempt lives")

    def _feed(self, scheduler: Scheduler, event: Event[ReplyT]) -> ReplyT:
        effects = scheduler.core.apply(event, self.now_s)
        for outputs in effects.tokens:
            self._deliver(scheduler, outputs)
        for failure in effects.failures:
            self._fail(scheduler, failure.handle, failure.error)
        for address in effects.executors_to_plan:
            self._plan(scheduler, address)
        if self._is_open(scheduler):
            waiting, scheduler.waiting = scheduler.waiting, []
            for do in waiting:
                do()
        return effects.reply

    def _fail(self, scheduler: Scheduler, handle: int, error: RequestFailedError) -> None:
        call = scheduler.calls.get(handle)
        self.tell(f"{scheduler.name} fails the request: {error}")
        if call is not None:
            self._close_call(call, None)

    def _plan(self, scheduler: Scheduler, address: str) -> None:
        link, host = scheduler.links.get(address), self.hosts[address]
        if link is None or not link.is_open:
            return
        while (plan := scheduler.core.plan(address, self.now_s)) is not None:
            self.tell(f"{scheduler.name} plans step {plan.step_id} of {address}: {_verbs(plan)}")
            self.send(
                f"plans of {address}, {id(link)}",
                partial(self._receive, host, link, plan),
            )

    def _receive(self, host: Host, link: Link, plan: BatchPlan) -> None:
        if link is host.link and link.is_open:
            host.executor.receive(plan)
            self._run(host)

    def _run(self, host: Host) -> None:
        """Run what is waiting, one step at a time."""
        if host.is_running or not host.executor.num_plans_waiting:
            return
        host.is_running = True
        incarnation = host.executor.incarnation

        def end() -> None:
            if host.executor.incarnation != incarnation:
                return
            host.is_running = False
            if host.executor.num_plans_waiting and host.link is not None:
                link, result = host.link, host.executor.run_next()
                self.send(f"results of {host.address}, {id(link)}", lambda: self._finish(link, result))
            self._run(host)

        self.later(_STEP_S, end)

    def _finish(self, link: Link, result: StepResult) -> None:
        """A result arrives; of a stream that was given up it changes nothing."""
        if link.scheduler.process != link.process:
            return
        try:
            self._feed(link.scheduler, StepFinished(link.address, result))
        except DivergenceError as error:
            self.require(not (link.is_of_now and link.is_open), f"an executor's result fits: {error}")

    def _restart(self, host: Host) -> None:
        number = len(self.rules) + 1
        rule = HashRule(VOCAB_SIZE, salt=0 if self.world.is_reproducible else number)
        self.rules.append(rule)
        host.executor.kind = replace(host.executor.kind, rule=rule)
        host.executor.incarnation = 10 * number
        host.executor.restart()
        host.is_running = False

    def _tick(self) -> None:
        for scheduler in self.schedulers:
            self._feed(scheduler, Tick())

    # Faults

    def faults(self) -> list[Fault]:
        """Return all that may go wrong now."""
        found: list[Fault] = []
        call = self.client.call
        if call is not None:
            found.append((CUT, "the client's stream breaks", partial(self._cut, call)))
        if self.client.attachment and self.client.end is None:
            found.append((CANCEL, "the client cancels", self._cancel))
        found += [
            (CRASH, f"{host.address} dies and comes back", partial(self._kill, host)) for host in self.hosts.values()
        ]
        for scheduler in self.schedulers:
            if scheduler.is_standby:
                for address in _ADDRESSES if self.left[DISPLACE] else ():
                    found.append(
                        (
                            DISPLACE,
                            f"{scheduler.name} takes {address} over",
                            partial(self._displace, scheduler, address),
                        )
                    )
                continue
            for address in _ADDRESSES:
                name = f"{scheduler.name} dies and comes back, and {address} answers later"
                found.append((CRASH, name, partial(self._kill_scheduler, scheduler, address)))
                for back_s in _BACK_S:
                    name = f"{scheduler.name} takes {address} for lost for {back_s:g} s"
                    found.append((LOSS, name, partial(self._lose, scheduler, address, back_s)))
            for address, link in scheduler.links.items():
                if not link.is_open:
                    continue
                found.append((PLAN_CUT, f"the plan stream to {address} breaks", partial(self._cut_link, link)))
                found.append((MOVE, f"what {address} runs is moved", partial(self._move, link)))
        return found

    def _cut(self, call: Call) -> None:
        self._hang_up(call)
        self._hear_end_at_once(call)

    def _hear_end_at_once(self, call: Call) -> None:
        if self.client.call is call:
            self.client.call = None
            self.later(_AGAIN_S, self._attach_client)

    def _kill(self, host: Host) -> None:
        """What was on its way from it may still arrive."""
        self.is_excused = True
        link = host.link
        self._restart(host)
        if link is not None and link.is_open:
            self._cut_link(link)

    def _shut(self, link: Link) -> None:
        """Both ends see it, each in its time: the executor then drops what it has not launched."""
        link.is_open = False
        host = self.hosts[link.address]
        self.send(f"plans of {link.address}, {id(link)}", lambda: host.drop_waiting() if host.link is link else None)

    def _cut_link(self, link: Link) -> None:
        self._shut(link)
        if link.is_of_now:
            self._feed(link.scheduler, StreamEnded(link.address))
            self._seek(link.scheduler, link.address, _AGAIN_S)

    def _lose(self, scheduler: Scheduler, address: str, back_s: float) -> None:
        self.is_excused = True
        link = scheduler.links.get(address)
        if link is not None and link.is_open:
            self._shut(link)
        self._feed(scheduler, ExecutorLost(address))
        self._seek(scheduler, address, back_s)

    def _move(self, link: Link) -> None:
        scheduler, process = link.scheduler, link.process
        self._feed(scheduler, DrainExecutor(link.address))
        self._plan(scheduler, link.address)

        def undo() -> None:
            if scheduler.process == process and link.address in scheduler.links:
                self._feed(scheduler, UndrainExecutor(link.address))
                self._plan(scheduler, link.address)

        self.later(0.02, undo)

    def _kill_scheduler(self, scheduler: Scheduler, late: str) -> None:
        """What was told to clients may still arrive."""
        for call in [call for call in scheduler.opened if call.is_served]:
            self._close_call(call, None)
        for link in scheduler.links.values():
            self._shut(link)
        scheduler.begin()
        self._boot(scheduler, late)

    def _displace(self, scheduler: Scheduler, address: str) -> None:
        """It takes one executor over; the other scheduler then gives up all, and it gets the rest."""
        other = next(each for each in self.schedulers if each is not scheduler)
        process = other.process
        scheduler.begin()
        self._feed(scheduler, ExpectExecutors(_ADDRESSES))
        self._attach_anyway(scheduler, address)
        for each in _ADDRESSES:
            self._seek(scheduler, each, _AGAIN_S)
        self.send(f"what {other.name} learns", lambda: self._yield(other) if other.process == process else None)

    def _yield(self, scheduler: Scheduler) -> None:
        self.tell(f"{scheduler.name} gives up all")
        for link in scheduler.links.values():
            self._shut(link)
        self._feed(scheduler, BeginAnew("another scheduler took over", None, _ADDRESSES))
        scheduler.links.clear()
        for call in [call for call in scheduler.opened if call.is_served]:
            self._close_call(call, None)
        scheduler.process += 1
        scheduler.is_standby = True

    def prepare_aftermath(self) -> None:
        """Take executor 1 for lost before its first result comes, and die when the first of executor 2 has come."""
        self.run(0.024)
        (scheduler,) = self.schedulers
        self._lose(scheduler, _ADDRESSES[0], 60.0)
        self.run(0.0205)
        if self.gen.int_inclusive(1) and self.client.call is not None:
            self.tell("what was told gets lost")
            self._cut(self.client.call)
        self._kill_scheduler(scheduler, _ADDRESSES[self.gen.int_inclusive(1)])

    # The end

    def settle(self) -> None:
        """Nothing more goes wrong: the client has its end, and no row stays."""
        for _ in range(_ENDING_S):
            if self.client.end is not None:
                break
            self.run(0.25)
        late_s = max(LATE_S) + 1 if self.left[LATE] != self._budget.get(LATE, 0) else 0.0
        if self.client.end is None and late_s:
            self.run(late_s)
        self.require(self.client.end is not None, "the client gets its end")
        for _ in range(20):
            if self.is_quiet and not any(host.executor.rows for host in self.hosts.values()):
                break
            self.run(5.0)
        for host in self.hosts.values():
            self.require(not host.executor.rows, "no row stays")
            is_ended = all(record.released is not None for record in host.executor.records.values())
            self.require(is_ended, "no record without an end stays")
            for record in host.executor.records.values():
                is_end = record.released is not None and record.released.reason is FinishReason.LENGTH
                is_whole = record.output_token_ids.size == LENGTH
                self.require(is_whole or not is_end, "what is let go is nobody's end")


def _rows(snapshot: Snapshot) -> str:
    seen = [
        f"attempt {row.attempt} with {row.output_token_ids.tolist()}{' (a record)' * (row.row is None)}"
        for row in snapshot.rows
    ]
    return ", ".join(seen) or "nothing"


def _output(scheduler: Scheduler, live: LiveRequest) -> list[int]:
    return [int(token) for token in scheduler.core.state.output_of(live)]


def _verbs(plan: BatchPlan) -> str:
    placed = [f"place attempt {new.attempt} with {new.output_token_ids.tolist()}" for new in plan.new_requests]
    released = [f"release {release.final and release.final.reason.name}" for release in plan.releases]
    return ", ".join([*released, *placed, *["run"] * plan.rows.size])


def resume_run(gen: Gen, budget: Budget, world: World, window_s: float = 0.5) -> None:
    """Run once: what may go wrong in the first half second, or less, and what becomes of it."""
    run = ResumeWorld(gen, budget, world)
    if world.is_aftermath:
        run.prepare_aftermath()
    run.run(window_s, run.faults)
    run.settle()
