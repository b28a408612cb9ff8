"""Makes the channel that a client uses now: goes from address to address until one takes it in.

Knows how long to try, and says what became of each address; `address_picker` says which is next, `addresses` which
there are. Refuses to know what channels are for.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline_client.address_picker import HEAD_START_SECONDS, AddressPicker
from paceline_client.addresses import Addresses, may_be_followed
from paceline_client.channel import Channel
from paceline_client.config import Retry
from paceline_client.errors import ClientClosedError, ConnectFailedError, PacelineError

# Where the next pause is longer than the time that is left the last round is made so long before its end.
_LAST_ROUND_SECONDS = 0.5
_NO_ANSWER = "no answer in time"

ChannelT_co = TypeVar("ChannelT_co", bound=Channel, covariant=True)


@dataclass(slots=True, eq=False)
class SharedChannel(Generic[ChannelT_co]):
    """Its channel is closed when it was left and nobody uses it."""

    address: str
    channel: ChannelT_co
    num_users: int = 0
    is_left: bool = False


class Dialler(Generic[ChannelT_co]):
    """Used on one event loop, by one caller of `connect` at a time. `dial` makes a channel, which has not connected
    yet.
    """

    def __init__(self, addresses: Addresses, *, dial: Callable[[str], ChannelT_co], retry: Retry) -> None:
        self._addresses = addresses
        self._dial = dial
        self._picker = AddressPicker(retry)
        self._endpoint: SharedChannel[ChannelT_co] | None = None
        self._endpoints: dict[SharedChannel[ChannelT_co], None] = {}  # all whose channels are not closed yet
        self._closing: set[asyncio.Task[None]] = set()
        self._whys: dict[str, str] = {}  # what was the matter with an address since it last connected
        self._outside: str | None = None  # the address that a server of the target named last, and it has not
        self._answered: set[str] = set()  # addresses whose servers said that another one is to be asked
        self._refusing: set[str] = set()  # addresses whose last attempt was answered with a failure
        self._stopped = asyncio.Event()

    @property
    def trouble(self) -> str:
        """Empty when something is connected, or nothing was tried yet."""
        return str(self.failure()) if self._endpoint is None and self._whys else ""

    async def connect(self, deadline_s: float, *, refused_deadline_s: float = math.inf) -> SharedChannel[ChannelT_co]:
        """`ConnectFailedError` when none can be made before this time of the loop; the second time counts where every
        address refuses.
        """
        loop = asyncio.get_running_loop()
        await self.pause(0.0)
        if self._endpoint is not None:
            if self._endpoint.channel.is_ready:
                return self._endpoint
            self.broke(self._endpoint.address, loop.time())
            self.leave(self._endpoint)
        resume_at_s = self._resume_at_s(deadline_s)
        while True:
            await self.pause(resume_at_s - loop.time())
            await self._addresses.look()
            await self.pause(0.0)
            if (endpoint := await self._go_round(deadline_s, refused_deadline_s)) is not None:
                self._endpoint = endpoint
                self._whys.pop(endpoint.address, None)
                self._refusing.discard(endpoint.address)
                return endpoint
            resume_at_s = self._resume_at_s(deadline_s)

    def failure(self) -> ConnectFailedError:
        """Says of each address why it cannot be reached."""
        known = self._addresses.known + (() if self._outside is None else (self._outside,))
        whys = {address: " ".join((self._whys.get(address) or _NO_ANSWER).split()) for address in known}
        if len(known) == 1:
            what = f"{known[0]}: {whys[known[0]]}"
        else:
            what = ", ".join(f"{address} ({why})" for address, why in whys.items()) or str(self._addresses)
        trouble = f"; {self._addresses.trouble}" if self._addresses.trouble else ""
        # Who was answered, if only by words, need not ask whether something runs there.
        reason = "NOT_SERVED" if self._answered else "CONNECT_FAILED"
        return ConnectFailedError(f"cannot reach {what}{trouble}", reason=reason)

    async def pause(self, seconds: float) -> None:
        """`ClientClosedError` as soon as the client is closed."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopped.wait()
        if self._stopped.is_set():
            raise ClientClosedError("the client is closed")

    async def stop(self) -> None:
        """Whoever pauses, looks up a name or connects is woken."""
        self._stopped.set()
        await self._addresses.close()

    async def close(self) -> None:
        """Close what is open, whoever uses it."""
        await self.stop()
        for endpoint in tuple(self._endpoints):
            self._close(endpoint)
        if self._closing:
            await asyncio.wait(self._closing)

    # Who uses a channel

    @contextlib.contextmanager
    def use(self, endpoint: SharedChannel[ChannelT_co]) -> Iterator[ChannelT_co]:
        """Keep the channel open meanwhile, also when it is left."""
        self.hold(endpoint)
        try:
            yield endpoint.channel
        finally:
            self.release(endpoint)

    def hold(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        """Keep the channel open until `release`."""
        endpoint.num_users += 1

    def release(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        endpoint.num_users -= 1
        if endpoint.is_left and not endpoint.num_users:
            self._close(endpoint)

    def leave(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        """Use it for nothing new; it is closed once nobody uses it."""
        if self._endpoint is endpoint:
            self._endpoint = None
        endpoint.is_left = True
        if not endpoint.num_users:
            self._close(endpoint)

    def _close(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        # In a task of its own: whoever is cancelled meanwhile must not leave it open.
        if endpoint in self._endpoints:
            del self._endpoints[endpoint]
            task = asyncio.create_task(endpoint.channel.close(), name="paceline-close")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # What became of an address

    def served(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        if self._endpoint is endpoint:
            self._picker.served(endpoint.address)

    def turned_away(self, endpoint: SharedChannel[ChannelT_co], error: PacelineError) -> None:
        """Another server is to be asked, or this one cannot be reached. What still runs there may end."""
        if self._endpoint is endpoint:
            self.leave(endpoint)
            self.refused(endpoint.address, error, asyncio.get_running_loop().time())

    def failed(self, address: str, why: str, at_s: float) -> None:
        self._whys[address] = why
        self._answered.discard(address)
        self._picker.failed(address, at_s)

    def refused(self, address: str, error: PacelineError, at_s: float) -> None:
        """Another server is to be asked, perhaps a named one, and this one again later."""
        self._whys[address] = str(error)
        self._answered.add(address)
        self._picker.failed(address, at_s, asked_seconds=error.retry_after or 0.0)
        active, known = error.metadata.get("active_address", ""), self._addresses.known
        if address in known:
            self._outside = None
        if active in known:
            self._picker.referred_to(active)
        elif address in known and may_be_followed(active, named_by=address):
            # One step outside the target and no further: only what the caller named is believed.
            self._outside = active
            self._picker.named_outside(active)

    def broke(self, address: str, at_s: float) -> None:
        """Also for a server that fell silent."""
        self._picker.broke(address, at_s)

    def went_away(self, address: str, at_s: float) -> None:
        self._picker.went_away(address, self._addresses.known, at_s)

    # One attempt after another, and beside those that are silent

    async def _go_round(self, deadline_s: float, refused_deadline_s: float) -> SharedChannel[ChannelT_co] | None:
        """`ConnectFailedError` when nobody took the client in and no time is left."""
        loop, known = asyncio.get_running_loop(), self._addresses.known
        dialled: list[SharedChannel[ChannelT_co]] = []
        try:
            if (endpoint := await self._race(known, dialled)) is not None:
                dialled.remove(endpoint)
                return endpoint
            self._picker.end_round(loop.time())
            is_refused = set(known) <= self._refusing and self._picker.resume_at_s >= refused_deadline_s
            if is_refused or (self._picker.resume_at_s >= deadline_s and self._resume_at_s(deadline_s) <= loop.time()):
                raise self.failure()
            return None
        finally:
            for endpoint in dialled:
                self.leave(endpoint)

    async def _race(
        self, known: tuple[str, ...], dialled: list[SharedChannel[ChannelT_co]]
    ) -> SharedChannel[ChannelT_co] | None:
        """Each gets a head start. All that were made are in `dialled` afterwards."""
        under_way: dict[asyncio.Task[bool], SharedChannel[ChannelT_co]] = {}
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            while True:
                address = self._picker.next_address(known, [endpoint.address for endpoint in under_way.values()])
                if address is not None:
                    # A new channel for each attempt: gRPC's own pauses of an old one do not apply to it.
                    dialled.append(self._new_endpoint(address))
                    attempt = dialled[-1].channel.becomes_ready(self._picker.attempt_seconds(known))
                    under_way[asyncio.create_task(attempt)] = dialled[-1]
                elif not under_way:
                    return None
                head_start = None if address is None else HEAD_START_SECONDS
                await asyncio.wait([*under_way, stopped], timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
                await self.pause(0.0)
                if (endpoint := self._winner(under_way)) is not None:
                    return endpoint
        except asyncio.CancelledError:
            if len(known) > 1:
                # The time of one caller was too short: the next one begins elsewhere.
                self._note_silent(under_way.values())
            raise
        finally:
            for task in (stopped, *under_way):
                task.cancel()

    def _new_endpoint(self, address: str) -> SharedChannel[ChannelT_co]:
        endpoint = SharedChannel(address, self._dial(address))
        self._endpoints[endpoint] = None
        return endpoint

    def _winner(
        self, under_way: dict[asyncio.Task[bool], SharedChannel[ChannelT_co]]
    ) -> SharedChannel[ChannelT_co] | None:
        """Those that failed are taken out, and so are those it overtook."""
        silent: list[SharedChannel[ChannelT_co]] = []
        for task, endpoint in tuple(under_way.items()):
            if not task.done():
                silent.append(endpoint)
            elif task.result():
                self._note_silent(silent)
                return endpoint
            else:
                del under_way[task]
                why = endpoint.channel.why_not_ready
                (self._refusing.add if why else self._refusing.discard)(endpoint.address)
                self.failed(endpoint.address, why, asyncio.get_running_loop().time())
        return None

    def _note_silent(self, endpoints: Iterable[SharedChannel[ChannelT_co]]) -> None:
        """Others are tried first from now on; these were given too little time to say what is the matter with them."""
        for endpoint in endpoints:
            self._refusing.discard(endpoint.address)
            self._picker.failed(endpoint.address, asyncio.get_running_loop().time())

    def _resume_at_s(self, deadline_s: float) -> float:
        """After the pause, or at the last moment."""
        resume_at_s = self._picker.resume_at_s
        return resume_at_s if resume_at_s < deadline_s else deadline_s - _LAST_ROUND_SECONDS
