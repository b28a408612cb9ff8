"""Messages in a few words, for the story of a run and for its hash."""

from paceline.plan.codec.bounds import BoundError
from paceline.plan.values import BatchPlan, Heartbeat, RecordId, RowState, SnapshotPart, StepResult, Welcome
from paceline.process.statuses import ErrorStatus
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import plan_pb2
from simulation.executors import ATTACH, GET_INFO
from simulation.mangling import read
from simulation.network import Call, Inbox

_SHORT = 120
_LENGTH_DELIMITED = 2
_BEATS = {
    kind: kind.DESCRIPTOR.fields_by_name["heartbeat"].number << 3 | _LENGTH_DELIMITED
    for kind in (plan_pb2.AttachRequest, plan_pb2.AttachResponse)
}


def is_heartbeat(call: Call, inbox: Inbox, message: object) -> bool:
    """Tell whether a message says no more than that somebody is alive."""
    if isinstance(message, bytes):
        kind = plan_pb2.AttachRequest if inbox is call.to_server else plan_pb2.AttachResponse
        return call.method == ATTACH and message[0] == _BEATS[kind]
    if isinstance(message, pb.SessionRequest):
        return message.HasField("heartbeat")
    return isinstance(message, pb.SessionResponse) and message.HasField("heartbeat") and not message.deltas


def describe(call: Call, inbox: Inbox, message: object) -> str:
    """Return what arrives, and from where."""
    said = [message]
    if isinstance(message, bytes):
        said = _read(call, inbox, message) if call.method == ATTACH else [_answer(call)]
    return f"<- {inbox.sender.name}  {call.method} {call.number}: {'; '.join(map(_words, said))}"


def _read(call: Call, inbox: Inbox, data: bytes) -> list[object]:
    try:
        return list(read(call, inbox, data))
    except BoundError as error:
        return [error]


def _answer(call: Call) -> str:
    return "who it is" if call.method == GET_INFO else "tokenizer"


def _words(message: object) -> str:
    match message:
        case BatchPlan():
            return _plan(message)
        case StepResult():
            tokens = dict(zip(message.rows.tolist(), message.num_accepted.tolist(), strict=True))
            return f"result {message.epoch}.{message.step_id}, tokens by row {tokens}"
        case Heartbeat():
            return "heartbeat"
        case pb.SessionRequest():
            return _session_request(message)
        case pb.SessionResponse():
            return _session_response(message)
        case Welcome(incarnation, epoch):
            return f"welcome, incarnation {incarnation & 0xFFFF:04x}, epoch {epoch}"
        case SnapshotPart(rows):
            return "snapshot: " + ", ".join(_row(row) for row in rows)
        case ErrorStatus():
            return f"ends: {message.message}"
    return str(message)[:_SHORT]


def _plan(plan: BatchPlan) -> str:
    words = [f"plan {plan.epoch}.{plan.step_id}"]
    words += [f"places {_key(p.record_id)} attempt {p.attempt} on row {p.row}" for p in plan.new_requests]
    words += [f"releases row {release.row}{'' if release.final else ' for now'}" for release in plan.releases]
    if len(plan.rows):
        words.append("runs rows " + " ".join(map(str, plan.rows.tolist())))
    if plan.forget:
        words.append("forgets " + " ".join(map(_key, plan.forget)))
    return ", ".join(words)


def _session_request(message: pb.SessionRequest) -> str:
    match message.WhichOneof("message"):
        case "generate":
            asked = message.generate
            return f"generate {asked.request_id} attachment {asked.attachment} from {asked.resume_from}"
        case "cancel":
            return f"cancel {message.cancel.request_id}"
        case "acknowledge":
            return "acknowledge " + " ".join(message.acknowledge.request_ids)
    return "heartbeat"


def _session_response(message: pb.SessionResponse) -> str:
    words = [
        f"{each.request_id}.{each.delta.index} +{len(each.delta.token_ids)} at {each.delta.offset}"
        + (" ends" if each.delta.HasField("finish") else "")
        for each in message.deltas
    ]
    words += [f"{each.request_id} fails: {each.error.message[:_SHORT]}" for each in message.failures]
    if message.HasField("drain"):
        words.append("drain")
    return ", ".join(words) or "heartbeat"


def _row(row: RowState) -> str:
    return f"{_key(row.record_id)} row {row.row} attempt {row.attempt} output {len(row.output_token_ids)}"


def _key(key: RecordId) -> str:
    return f"{key.request_id}.{key.index}" if key.index else key.request_id
