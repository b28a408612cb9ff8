"""What a client gets of its request, after crashes, broken streams, lost executors and cancels.

One request of three tokens, one or two schedulers, two executors. The product's own are each scheduler's `Core` with
all its rules, and each executor's rows and engine, audited. Written here are the client, which does all it can, and
what lies between: calls, plan streams, and who drives an executor, which `attach_world` is about.
"""

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from both_sides.audited import VOCAB_SIZE, make_executor
from executor_rig.hash_runner import HashRule
from exhaustive.clockwork import LATE, Budget, Clockwork, Do
from exhaustive.gen import Gen
from exhaustive.resume_parts import LENGTH, REQUEST, Call, Client, End, Host, Link, Scheduler, World
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import BatchPlan, FinishReason, StepResult
from paceline_scheduler.core.events import (
    Cancel,
    Detach,
    Event,
    ExecutorAttached,
    ExpectExecutors,
    ReplyT,
    Resume,
    StepFinished,
    StreamEnded,
    Tick,
)
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.live import RESUME_WINDOW_S, LiveRequest
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.request import ResumePoint
from paceline_scheduler.errors import (
    DivergenceError,
    NoExecutorError,
    RequestFailedError,
    RequestRefusedError,
    ResumeMismatchError,
    UnknownRequestError,
)

LATE_S = (0.03, 0.1, RESUME_WINDOW_S + 1)
_STEP_S = 0.01
AGAIN_S = 0.007  # before somebody attaches again
_LATER_S = 0.02
BACK_S = (0.02, 0.5)  # before an executor is looked for that was taken for lost
_ENDING_S = 12
ADDRESSES = ("executor 1", "executor 2")


class ResumeWorld(Clockwork):
    """A client, schedulers, executors, and what is on its way between them."""

    def __init__(self, gen: Gen, budget: Budget, given: World) -> None:
        super().__init__(gen, budget, LATE_S)
        self.given = given
        self.is_excused = False  # something was lost that a client without its tokens cannot do without
        self.rules: list[HashRule] = []
        self.client = Client()
        self.hosts = {address: Host(address, make_executor(max_num_rows=2, num_blocks=8)) for address in ADDRESSES}
        self.schedulers = [Scheduler(name) for name in "AB"[: given.num_schedulers]]
        self.caller = Caller(self)
        self.answering = Answering(self)
        self.driving = Driving(self)
        self.executing = Executing(self)
        for host in self.hosts.values():
            self.executing.restart(host)
        for standby in self.schedulers[1:]:
            standby.is_standby = True
        self.driving.boot(self.schedulers[0])
        self.later(AGAIN_S, self.caller.attach)
        self.every(5.0, self._tick)

    def _tick(self) -> None:
        for scheduler in self.schedulers:
            self.driving.feed(scheduler, Tick())

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


class Caller:
    """The client and its calls, up and down."""

    def __init__(self, world: "ResumeWorld") -> None:
        self._world = world
        self._handles = itertools.count(1)

    def attach(self) -> None:
        client = self._world.client
        if client.end is not None or client.call is not None or client.wants_none:
            return
        scheduler = next((each for each in self._world.schedulers if not each.is_standby and each.links), None)
        if scheduler is None:
            self._world.later(AGAIN_S, self.attach)
            return
        client.attachment += 1
        held = np.array(client.held, dtype=np.int32)
        prior = held if self._world.given.has_prior else None
        point = ResumePoint(len(held), rolling_hash(HASH_START, held), client.last_attempt, prior)
        call = client.call = Call(scheduler, scheduler.process, next(self._handles))
        request = replace(REQUEST, handle=call.handle, attachment=client.attachment, point=point)
        self._world.tell(f"the client attaches to {scheduler.name}, {client.attachment}, holding {client.held}")
        seconds = self._up(call, lambda: self._world.answering.gate(call, Resume((request,))))
        self._world.is_excused |= seconds > RESUME_WINDOW_S

    def _up(self, call: Call, do: Do) -> float:
        def arrives() -> None:
            if call.scheduler.process == call.process:
                do()
            elif call.is_served:
                self._world.answering.end(call)

        return self._world.send(f"call {call.handle}, up", arrives)

    def down(self, call: Call, do: Do) -> None:
        """Send to the client, for as long as it listens."""

        def arrives() -> None:
            if call.is_open:
                do()

        self._world.send(f"call {call.handle}, down", arrives)

    def take(self, offset: int, tokens: list[int], attempt: int) -> None:
        client = self._world.client
        self._world.tell(f"the client gets {tokens} of attempt {attempt}")
        self._world.require(offset == len(client.held), "the client is told what follows what it holds")
        for token in tokens:
            context = [*REQUEST.prompt_token_ids.tolist(), *client.held]
            drawn = {rule.next_token(context, REQUEST.sampling.seed, len(client.held)) for rule in self._world.rules}
            self._world.require(token in drawn, "each token is computed from exactly the tokens that the client holds")
            client.held.append(token)
        client.last_attempt = max(client.last_attempt, attempt)

    def hear_end(self, call: Call, end: End | None) -> None:
        """None: it is to try again."""
        call.is_open = False
        client = self._world.client
        if client.call is not call:
            return
        client.call = None
        if end is None:
            self._world.later(AGAIN_S, self.attach)
            return
        self._world.tell(f"the client has {end.value}")
        if end is End.WHOLE:
            self._world.require(len(client.held) == LENGTH, "the end comes behind all tokens")
        self._world.require(
            end is not End.REFUSED or self._world.is_excused, "a client is refused only if something was lost"
        )
        client.end = end

    def cancel(self) -> None:
        """The caller wants no more of it: hang up, and cancel by key."""
        client, call = self._world.client, self._world.client.call
        client.wants_none, client.call = True, None
        if call is not None:
            self._hang_up(call)
        self._cancel_anywhere()

    def _cancel_anywhere(self) -> None:
        scheduler = next(
            (each for each in self._world.schedulers if not each.is_standby and self._world.answering.is_open(each)),
            None,
        )
        if scheduler is None:
            self._world.later(AGAIN_S, self._cancel_anywhere)
            return
        self._world.client.end = End.CANCELLED
        with suppress(UnknownRequestError):
            self._world.driving.feed(scheduler, Cancel(REQUEST.key))

    def cut(self, call: Call) -> None:
        """The call breaks: the client tries again."""
        self._hang_up(call)
        self.hear_end(call, None)

    def _hang_up(self, call: Call) -> None:
        call.is_open = False
        self._up(call, lambda: self._world.answering.end(call))


class Answering:
    """What schedulers do for clients."""

    def __init__(self, world: "ResumeWorld") -> None:
        self._world = world

    def is_open(self, scheduler: Scheduler) -> bool:
        """Whether it drives an executor and knows what all of them run."""
        return scheduler.core.state.executors.is_synced and bool(scheduler.links)

    def gate(self, call: Call, resume: Resume) -> None:
        """Clients are answered when it is known what all executors run."""
        if call not in call.scheduler.opened:
            call.scheduler.opened.append(call)
        if self.is_open(call.scheduler):
            self._answer(call, resume)
        else:
            call.scheduler.waiting.append(lambda: self.gate(call, resume))

    def _answer(self, call: Call, resume: Resume) -> None:
        if not call.is_served:
            return
        scheduler = call.scheduler
        try:
            (resumed,) = self._world.driving.feed(scheduler, resume)
        except ResumeMismatchError:
            self.close(call, End.REFUSED)
            return
        except NoExecutorError:  # it drains, and the other one is away: nobody else has the request
            self.close(call, None)
            return
        except RequestRefusedError as error:
            self._world.require(call is not self._world.client.call, f"the newest attachment never gives way: {error}")
            self.close(call, None)
            return
        for before in [each for each in scheduler.calls.values() if each is not call]:
            self._world.require(before is not self._world.client.call, "the newest attachment never gives way")
            self.close(before, None)
        scheduler.calls[call.handle] = call
        if resumed.outputs is not None:
            self.deliver(scheduler, resumed.outputs)

    def deliver(self, scheduler: Scheduler, outputs: TokenOutputs) -> None:
        start = 0
        for index, handle in enumerate(outputs.handles):
            end = start + int(outputs.num_tokens[index])
            call = scheduler.calls.get(handle)
            if call is not None:
                told = int(outputs.offsets[index]), outputs.token_ids[start:end].tolist(), int(outputs.attempts[index])
                self._world.caller.down(call, partial(self._world.caller.take, *told))
                notice = outputs.finishes.get(handle)
                if notice is not None:
                    self.close(call, End.CANCELLED if notice.reason == FinishReason.CANCELLED else End.WHOLE)
            start = end

    def fail(self, scheduler: Scheduler, handle: int, error: RequestFailedError) -> None:
        """Let the client try again."""
        call = scheduler.calls.get(handle)
        self._world.tell(f"{scheduler.name} fails the request: {error}")
        if call is not None:
            self.close(call, None)

    def close(self, call: Call, end: End | None) -> None:
        """End a call at the scheduler's side. None: the client is to try again."""
        call.is_served = False
        call.scheduler.calls.pop(call.handle, None)
        self._world.caller.down(call, lambda: self._world.caller.hear_end(call, end))

    def end(self, call: Call) -> None:
        """The scheduler sees that the client has gone, perhaps from a call that is over."""
        if call.is_served:
            self.close(call, None)
        scheduler = call.scheduler
        if scheduler.process == call.process:
            self._world.driving.feed(scheduler, Detach(call.handle))
            live = scheduler.live
            is_heard = live is None or live.detached_until_s is None or live.request.handle not in scheduler.calls
            self._world.require(is_heard, "who listens is not taken for gone because of an earlier stream")


class Driving:
    """What schedulers do with executors."""

    def __init__(self, world: "ResumeWorld") -> None:
        self._world = world

    def boot(self, scheduler: Scheduler, late: str = "") -> None:
        """One of the executors may answer late."""
        self.feed(scheduler, ExpectExecutors(ADDRESSES))
        for address in ADDRESSES:
            self.seek(scheduler, address, AGAIN_S + _LATER_S * (address == late))

    def seek(self, scheduler: Scheduler, address: str, seconds: float) -> None:
        """Attach after a while, if the process still runs."""
        process = scheduler.process
        self._world.later(seconds, lambda: self._attach(scheduler, address) if scheduler.process == process else None)

    def _attach(self, scheduler: Scheduler, address: str) -> None:
        """Attach where nobody drives, unless it does already."""
        host, link = self._world.hosts[address], scheduler.links.get(address)
        if scheduler.is_standby or (link is not None and link.is_open and link is host.link):
            return
        other = host.link
        if other is not None and other.is_open and other.scheduler is not scheduler and other.is_of_now:
            self.seek(scheduler, address, BACK_S[1])
            return
        self.attach_anyway(scheduler, address)

    def attach_anyway(self, scheduler: Scheduler, address: str) -> None:
        """Attach, whoever drives."""
        host = self._world.hosts[address]
        if host.link is not None:
            host.link.is_open = False
        host.link = scheduler.links[address] = Link(scheduler, scheduler.process, address)
        description, snapshot = host.executor.attach(address)
        self._world.tell(f"{scheduler.name} attaches to {address}: {_rows(snapshot)}")
        before = scheduler.live
        known = None if before is None else (before.attempt, scheduler.core.state.output_of(before).tolist())
        self.feed(scheduler, ExecutorAttached(description, snapshot))
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
            self._world.require(not is_here or seen.attempt >= attempt, "a lower attempt takes no row's place")
            self._world.require(is_here or seen.attempt <= attempt or not fits, "of two rows the higher attempt lives")

    def feed(self, scheduler: Scheduler, event: Event[ReplyT]) -> ReplyT:
        effects = scheduler.core.apply(event, self._world.now_s)
        for outputs in effects.tokens:
            self._world.answering.deliver(scheduler, outputs)
        for failure in effects.failures:
            self._world.answering.fail(scheduler, failure.handle, failure.error)
        for address in effects.executors_to_plan:
            self.plan(scheduler, address)
        if self._world.answering.is_open(scheduler):
            waiting, scheduler.waiting = scheduler.waiting, []
            for do in waiting:
                do()
        return effects.reply

    def plan(self, scheduler: Scheduler, address: str) -> None:
        link, host = scheduler.links.get(address), self._world.hosts[address]
        if link is None or not link.is_open:
            return
        while (plan := scheduler.core.plan(address, self._world.now_s)) is not None:
            self._world.tell(f"{scheduler.name} plans step {plan.step_id} of {address}: {_verbs(plan)}")
            self._world.send(
                f"plans of {address}, {id(link)}",
                partial(self._world.executing.receive, host, link, plan),
            )

    def finish(self, link: Link, result: StepResult) -> None:
        """A result arrives; of a stream that was given up it changes nothing."""
        if link.scheduler.process != link.process:
            return
        try:
            self.feed(link.scheduler, StepFinished(link.address, result))
        except DivergenceError as error:
            self._world.require(not (link.is_of_now and link.is_open), f"an executor's result fits: {error}")

    def shut(self, link: Link) -> None:
        """Both ends see it, each in its time: the executor then drops what it has not launched."""
        link.is_open = False
        host = self._world.hosts[link.address]
        self._world.send(
            f"plans of {link.address}, {id(link)}", lambda: host.drop_waiting() if host.link is link else None
        )

    def cut(self, link: Link) -> None:
        """The stream breaks: the scheduler attaches again."""
        self.shut(link)
        if link.is_of_now:
            self.feed(link.scheduler, StreamEnded(link.address))
            self.seek(link.scheduler, link.address, AGAIN_S)


class Executing:
    """What executors do."""

    def __init__(self, world: "ResumeWorld") -> None:
        self._world = world

    def restart(self, host: Host) -> None:
        number = len(self._world.rules) + 1
        rule = HashRule(VOCAB_SIZE, salt=0 if self._world.given.is_reproducible else number)
        self._world.rules.append(rule)
        host.executor.kind = replace(host.executor.kind, rule=rule)
        host.executor.incarnation = 10 * number
        host.executor.restart()
        host.is_running = False

    def receive(self, host: Host, link: Link, plan: BatchPlan) -> None:
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
                self._world.send(
                    f"results of {host.address}, {id(link)}", lambda: self._world.driving.finish(link, result)
                )
            self._run(host)

        self._world.later(_STEP_S, end)


def _rows(snapshot: Snapshot) -> str:
    seen = [
        f"attempt {row.attempt} with {row.output_token_ids.tolist()}{' (a record)' * (row.row is None)}"
        for row in snapshot.rows
    ]
    return ", ".join(seen) or "nothing"


def _verbs(plan: BatchPlan) -> str:
    placed = [f"place attempt {new.attempt} with {new.output_token_ids.tolist()}" for new in plan.new_requests]
    released = [f"release {release.final and release.final.reason.name}" for release in plan.releases]
    return ", ".join([*released, *placed, *["run"] * plan.rows.size])
