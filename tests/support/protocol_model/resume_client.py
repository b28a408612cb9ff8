"""What the client does in the resume model: send the request, again whenever its stream ended, and put tokens together.

Follows `clients/paceline_client`. `talk` is all of its streams to one scheduler.
"""

from collections.abc import Iterator

from protocol_model.checker import Move
from protocol_model.resume_state import LENGTH, Client, Ending, Faults, Opening, Phase, Scheduler, Stream, Word

Talk = tuple[Stream, ...]
_MAX_STREAMS = 2
"""The client attaches again when less than so many of its streams are still under way to that scheduler."""


class ClientMoves:
    """The moves of the client that concern one scheduler."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._scheduler = f"scheduler {'AB'[slot]}"

    def attach(self, client: Client, talk: Talk, scheduler: Scheduler) -> Iterator[Move]:
        """Send the request to a scheduler that drives executors; others send it away."""
        is_acting = Word.ATTACHED in scheduler.words
        if client.phase is Phase.WANTS and client.slot < 0 and is_acting and len(talk) < _MAX_STREAMS:
            attachment = client.attachment + 1
            stream = Stream(attachment, Opening(attachment, client.held, client.last_attempt))
            attached = client._replace(attachment=attachment, slot=self._slot)
            label = f"the client attaches to {self._scheduler}, {attachment}, holding {client.held}"
            yield label, (attached, (*talk, stream), scheduler)

    def listen(self, client: Client, talk: Talk, faults: Faults) -> Iterator[Move]:
        """Take what comes on the stream, or see it end. A stream that breaks delivers a part of what was sent."""
        stream = _own_stream(client, talk, self._slot)
        if stream is None:
            return
        if stream.deltas:
            delta = stream.deltas[0]
            heard = with_stream(talk, stream, stream._replace(deltas=stream.deltas[1:]))
            broken = "the client was told a token that does not follow those it holds" * (delta.base != client.held)
            got = client._replace(
                held=(*client.held, delta.token),
                last_attempt=max(client.last_attempt, delta.attempt),
                broken=broken or client.broken,
            )
            yield f"the client gets {delta}", (got, heard, faults)
        may_lose = stream.is_cut or stream.ending is Ending.UNAVAILABLE
        if may_lose or (stream.ending is not Ending.NONE and not stream.deltas):
            ending = Ending.UNAVAILABLE if stream.is_cut else stream.ending
            rest = stream._replace(is_open=False) if stream.ending is Ending.NONE else None
            yield (
                f"the client sees its stream end: {ending.name.lower()}",
                (_after_end(client, ending, faults), with_stream(talk, stream, rest), faults),
            )

    def leave(self, client: Client, talk: Talk, faults: Faults) -> Iterator[Move]:
        """The caller wants no more of it: close the stream, if there is one, and cancel by key."""
        stream = _own_stream(client, talk, self._slot)
        if not faults.cancels or client.phase is not Phase.WANTS or not client.attachment:
            return
        if client.slot in (-1, self._slot):
            closed = None if stream is None else with_stream(talk, stream, stream._replace(is_open=False))
            left = client._replace(phase=Phase.CANCELLING, slot=-1)
            fewer = faults._replace(cancels=faults.cancels - 1)
            yield "the client cancels", (left, talk if closed is None else closed, fewer)


def cut(talk: Talk, faults: Faults) -> Iterator[Move]:
    """A stream breaks."""
    if faults.client_cuts:
        for stream in talk:
            if stream.is_open and not stream.is_cut and stream.ending is Ending.NONE:
                broken = with_stream(talk, stream, stream._replace(is_cut=True))
                label = f"the client's stream {stream.attachment} breaks"
                yield label, (broken, faults._replace(client_cuts=faults.client_cuts - 1))


def with_stream(talk: Talk, before: Stream, after: Stream | None) -> Talk:
    """The streams with one changed, or gone because both ends have closed."""
    is_gone = after is None or (not after.is_open and after.ending is not Ending.NONE)
    changed = (after if stream is before else stream for stream in talk if stream is not before or not is_gone)
    return tuple(stream for stream in changed if stream is not None)


def _own_stream(client: Client, talk: Talk, slot: int) -> Stream | None:
    for stream in talk:
        if client.slot == slot and stream.attachment == client.attachment and stream.is_open:
            return stream
    return None


def _after_end(client: Client, ending: Ending, faults: Faults) -> Client:
    alone = client._replace(slot=-1)
    match ending:
        case Ending.DONE:
            broken = "the client was told the end before it had all tokens" * (len(client.held) != LENGTH)
            return alone._replace(phase=Phase.DONE, broken=broken or client.broken)
        case Ending.CANCELLED:
            return alone._replace(phase=Phase.FAILED, broken="a request was cancelled that nobody cancelled")
        case Ending.ABORTED:
            return alone._replace(phase=Phase.FAILED, broken="the newest attachment had to give way")
        case Ending.REFUSED:
            broken = "a request was refused though nothing of it was lost" * (not faults.is_excused)
            return alone._replace(phase=Phase.FAILED, broken=broken or client.broken)
        case _:
            return alone
