"""What a simulated executor says, in the messages of the scheduler's link.

Knows both sides' words. Refuses to know how they travel.
"""

from dataclasses import replace

from paceline_scheduler.backend import GenerationDefaults, TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.plan import StepResult
from paceline_scheduler.errors import LinkError, ProtocolMismatchError, StreamEndedError, TermSupersededError
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.messages import (
    DrainNotice,
    ExecutorInfo,
    FromExecutor,
    Heartbeat,
    Hello,
    ModelCard,
    RowPart,
    SnapshotPart,
    WaitingInLine,
    Welcome,
)
from paceline_scheduler.simulator.bytes_tokenizer import make_bytes_tokenizer
from paceline_scheduler.simulator.fence import Approach, Claim
from paceline_scheduler.simulator.service import (
    Accepted,
    Beat,
    Draining,
    Ended,
    InLine,
    Outgoing,
    SimulatedService,
    Stream,
    StreamEnd,
)

_TOKENIZER = make_bytes_tokenizer()
TOKENIZER_SOURCE = TokenizerSource(
    digest=_TOKENIZER.digest,
    json=_TOKENIZER.json,
    chat_template=_TOKENIZER.chat_template,
    bos_token_id=None,
    eos_token_id=_TOKENIZER.end_token_ids[0],
    end_token_ids=_TOKENIZER.end_token_ids,
    add_bos=False,
    defaults=GenerationDefaults(),
)


def info_of(service: SimulatedService) -> ExecutorInfo:
    """Return who an executor says it is."""
    return ExecutorInfo(
        incarnation=service.executor.incarnation,
        term=service.highest_term,
        holder_scheduler_id=service.holder_scheduler_id,
        vocab_size=service.executor.config.tokens.vocab_size,
        tokenizer_digest=_TOKENIZER.digest,
        num_waiting_schedulers=service.fence.num_waiting,
    )


def greet(service: SimulatedService, hello: Hello) -> Stream:
    """Open a stream."""
    approach = Approach.TAKE_OVER if hello.takeover else Approach.WAIT
    return service.hello(hello.scheduler_id, hello.term, approach, hello.protocols, hello.address)


def messages_of(service: SimulatedService, address: str, outgoing: Outgoing) -> list[FromExecutor]:
    """Return what a scheduler reads of it; raises the LinkError by which a stream ends."""
    match outgoing:
        case StepResult():
            return [outgoing]
        case Beat(running_step_id, running_ns):
            return [Heartbeat(running_step_id, running_ns)]
        case Accepted(description, snapshot, protocol):
            rows = tuple(RowPart(row, is_continued=False) for row in snapshot.rows)
            return [_welcome(service, address, description, protocol), SnapshotPart(rows, snapshot.tags, is_last=True)]
        case InLine(holder):
            return [WaitingInLine(_holder(holder))]
        case Draining(reason):
            return [DrainNotice(reason, 0.0)]
        case Ended():
            raise _error(outgoing)


def _welcome(service: SimulatedService, address: str, description: ExecutorDescription, protocol: int) -> Welcome:
    config = service.executor.config
    card = ModelCard(config.model, "simulated", config.max_model_len, config.tokens.vocab_size, 0, "")
    return Welcome(replace(description, address=address), card, _TOKENIZER.digest, protocol)


def _holder(claim: Claim) -> Holder:
    return Holder(claim.scheduler_id, claim.term, claim.address)


def _error(ended: Ended) -> LinkError:
    if ended.end is StreamEnd.SUPERSEDED:
        return TermSupersededError(_holder(ended.holder))
    sentence = f"{ended.end.value}: {ended.detail}"
    return ProtocolMismatchError(sentence) if ended.end is StreamEnd.PROTOCOL else StreamEndedError(sentence)
