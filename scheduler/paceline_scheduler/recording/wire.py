"""Records of a recording to and from bytes (`paceline/v1/recording.proto`). Knows messages and values, no rule."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from google.protobuf.message import DecodeError

from paceline.plan.codec.columns import column_bytes
from paceline.plan.codec.requests import read_plan, write_plan, write_record_id
from paceline.plan.codec.results import read_result, write_result
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import KEY_BYTES, BatchPlan, BlockTags, Int32Array, NewRequest, StepResult
from paceline.v1 import plan_pb2
from paceline.v1 import recording_pb2 as pb
from paceline_scheduler.core.events import Event, StepFinished
from paceline_scheduler.core.executors import History, Placement
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.graph import GraphError, Replacements, Value, read_value, write_value

FORMAT = 5
_DIGEST_BYTES = 16
_MAX_LENGTH_BYTES = 5  # of a varint


def _fields_but(kind: type, *names: str) -> "attrgetter[Any]":
    return attrgetter(*(field.name for field in fields(kind) if field.name not in names))


_NUMBERS = _fields_but(NewRequest, "prompt_token_ids", "output_token_ids", "sampling", "context", "trace_parent")
_SAMPLING = _fields_but(SamplingParams)
_HISTORY = _fields_but(History)


class TokenForm(enum.IntEnum):
    """The numbers are those of paceline.v1.TokenForm."""

    RAW = 1
    STAND_INS = 2


@dataclass(frozen=True, slots=True)
class Header:
    program_version: str
    scheduler_id: str
    token_form: TokenForm
    begun_unix_s: float
    number: int


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """What the core was told, and the name of the error if it refused that."""

    now: float
    event: Event[Any]
    refusal: str


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """What is kept of a plan: all but what its requests bring along, and a digest of that where it says more."""

    plan: BatchPlan
    digest: bytes


@dataclass(frozen=True, slots=True)
class RecordedPlanning:
    now: float
    address: str
    recorded: RecordedPlan | None


@dataclass(frozen=True, slots=True)
class RecordedKeys:
    """Prefix-cache keys of snapshots, each with the one of its tokens' stand-ins."""

    stand_ins: dict[bytes, bytes]


Record = Header | CoreState | RecordedEvent | RecordedPlanning | RecordedKeys


def encode_header(header: Header) -> bytes:
    return _framed(
        pb.Record(
            header=pb.RecordingHeader(
                format=FORMAT,
                program_version=header.program_version,
                scheduler_id=header.scheduler_id,
                token_form=pb.TokenForm.ValueType(header.token_form),
                begun_unix_s=header.begun_unix_s,
                number=header.number,
            )
        )
    )


def encode_state(state: CoreState, replacements: Replacements) -> bytes:
    return _framed(pb.Record(state=_write(state, replacements)))


def encode_event(now: float, event: Event[Any], refusal: str, replacements: Replacements) -> bytes:
    """Of any event but a step's end."""
    recorded = pb.RecordedEvent(now=now, event=_write(event, replacements), refusal=refusal)
    return _framed(pb.Record(event=recorded))


def encode_result(
    now: float, address: str, result: StepResult, *, is_refused: bool, token_ids: Int32Array | None = None
) -> bytes:
    """`token_ids`, if given, take the place of its own."""
    message = write_result(result)
    if token_ids is not None:
        message.token_ids = column_bytes(token_ids)
    return _framed(pb.Record(result=pb.RecordedResult(now=now, address=address, result=message, is_refused=is_refused)))


def encode_planning(now: float, address: str, plan: BatchPlan | None, form: TokenForm) -> bytes:
    planning = pb.RecordedPlanning(now=now, address=address)
    if plan is not None:
        message, digest = _outline(plan, form)
        planning.plan.CopyFrom(message)
        planning.digest = digest
    return _framed(pb.Record(planning=planning))


def encode_keys(stand_ins: dict[bytes, bytes]) -> bytes:
    keys = pb.RecordedKeys(seen=b"".join(stand_ins), stand_ins=b"".join(stand_ins.values()))
    return _framed(pb.Record(keys=keys))


def recorded_plan(plan: BatchPlan, form: TokenForm) -> RecordedPlan:
    message, digest = _outline(plan, form)
    return RecordedPlan(read_plan(message), digest)


def decode(data: bytes) -> Iterator[Record]:
    """Up to a record that was not written to its end. Raises RecordingError."""
    at = 0
    while (found := _frame(data, at)) is not None:
        begin, end = found
        try:
            record = _read(pb.Record.FromString(data[begin:end]))
        except (DecodeError, ValueError) as error:
            raise RecordingError(
                f"byte {at} of the recording is no record that this program can read: {error}"
            ) from None
        if not at and not isinstance(record, Header):
            raise RecordingError("this is no recording: it does not begin with a header")
        yield record
        at = end


def _read(record: pb.Record) -> Record:
    match record.WhichOneof("record"):
        case "header":
            return _read_header(record.header)
        case "state":
            state = _value(record.state)
            if not isinstance(state, CoreState):
                raise GraphError("what should be the state of a scheduler is something else")
            return state
        case "event":
            return RecordedEvent(record.event.now, _value(record.event.event), record.event.refusal)
        case "result":
            found = record.result
            refusal = "DivergenceError" if found.is_refused else ""
            return RecordedEvent(found.now, StepFinished(found.address, read_result(found.result)), refusal)
        case "planning":
            planning = record.planning
            plan = RecordedPlan(read_plan(planning.plan), planning.digest) if planning.HasField("plan") else None
            return RecordedPlanning(planning.now, planning.address, plan)
        case "keys":
            return RecordedKeys(dict(zip(_keys(record.keys.seen), _keys(record.keys.stand_ins), strict=True)))
    raise GraphError("a record of a kind that this version does not know")


def _read_header(header: pb.RecordingHeader) -> Header:
    if header.format != FORMAT:
        raise RecordingError(
            f"the recording has form {header.format}, this program reads form {FORMAT}; "
            f"repeat it with paceline {header.program_version}, which made it"
        )
    return Header(
        header.program_version,
        header.scheduler_id,
        TokenForm(header.token_form),
        header.begun_unix_s,
        header.number,
    )


def _outline(plan: BatchPlan, form: TokenForm) -> tuple[plan_pb2.BatchPlan, bytes]:
    """See RecordedPlan; the digest only if it may be known."""
    is_raw = form is TokenForm.RAW
    tags = plan.tags if is_raw or not len(plan.tags.block_ids) else _without_keys(plan.tags)
    if not plan.new_requests:
        return write_plan(plan if tags is plan.tags else replace(plan, tags=tags)), b""
    message = write_plan(replace(plan, tags=tags, new_requests=()))
    message.new_requests.extend(map(_outlined_request, plan.new_requests))
    return message, _digest(plan.new_requests) if is_raw else b""


def _outlined_request(new: NewRequest) -> plan_pb2.NewRequest:
    return plan_pb2.NewRequest(
        row=new.row,
        id=write_record_id(new.record_id),
        attempt=new.attempt,
        num_cached_tokens=new.num_cached_tokens,
        max_tokens=new.max_tokens,
        num_logprobs=new.num_logprobs,
        min_tokens=new.min_tokens or None,
        num_prompt_logprobs=new.num_prompt_logprobs,
    )


def _digest(new_requests: Iterable[NewRequest]) -> bytes:
    """Not of the messages: a digest costs a fifth of writing them."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for new in new_requests:
        assert isinstance(new, Placement), "the core writes no others"
        request = new.request
        values = _NUMBERS(new), _SAMPLING(new.sampling), _HISTORY(new.history), request.body_digest
        told = repr(values).encode()
        lengths = len(told), new.prompt_token_ids.nbytes, new.output_token_ids.nbytes
        for data in (
            repr(lengths).encode(),
            told,
            column_bytes(new.prompt_token_ids),
            column_bytes(new.output_token_ids),
            request.origin,
        ):
            digest.update(data)
    return digest.digest()


def _without_keys(tags: BlockTags) -> BlockTags:
    return BlockTags(tags.block_ids, bytes(len(tags.keys)))


def _keys(data: bytes) -> list[bytes]:
    return [data[begin : begin + KEY_BYTES] for begin in range(0, len(data), KEY_BYTES)]


def _write(value: object, replacements: Replacements) -> pb.RecordedValue:
    graph, columns = write_value(value, replacements)
    return pb.RecordedValue(graph=graph, columns=columns)


def _value(message: pb.RecordedValue) -> Value:
    return read_value(message.graph, message.columns)


def _framed(record: pb.Record) -> bytes:
    data = record.SerializeToString()
    length, head = len(data), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data


def _frame(data: bytes, at: int) -> tuple[int, int] | None:
    """Return where the record lies whose length stands here; None if it is not whole."""
    length = 0
    for place in range(_MAX_LENGTH_BYTES):
        if at + place >= len(data):
            return None
        byte = data[at + place]
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            begin = at + place + 1
            return (begin, begin + length) if begin + length <= len(data) else None
    raise RecordingError(f"byte {at} of the recording is no length: the file is damaged")
