"""What a simulated executor says, in the messages of the scheduler's link.

Knows both sides' words. Refuses to know how they travel.
"""

from hashlib import blake2b

from paceline.bytes_tokenizer import CHAT_TEMPLATE, END_TOKEN_IDS, make_bytes_tokenizer
from paceline.plan.values import (
    Drain,
    ExecutorInfo,
    ExecutorLimits,
    FromExecutor,
    GenerationDefaults,
    Heartbeat,
    Hello,
    KvGeometry,
    Model,
    SnapshotPart,
    StepResult,
    WaitingInLine,
    Welcome,
)
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.errors import LinkError, ProtocolMismatchError, StreamEndedError, TermSupersededError
from paceline_scheduler.holder import Holder
from paceline_scheduler.simulator.fence import Approach
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

_TOKENIZER_JSON = make_bytes_tokenizer()
TOKENIZER_SOURCE = TokenizerSource(
    digest=blake2b(_TOKENIZER_JSON, digest_size=16).hexdigest(),
    json=_TOKENIZER_JSON,
    chat_template=CHAT_TEMPLATE,
    bos_token_id=None,
    eos_token_id=END_TOKEN_IDS[0],
    end_token_ids=END_TOKEN_IDS,
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
        tokenizer_digest=TOKENIZER_SOURCE.digest,
        num_waiting_schedulers=service.fence.num_waiting,
    )


def greet(service: SimulatedService, hello: Hello) -> Stream:
    """Open a stream."""
    approach = Approach.TAKE_OVER if hello.takeover else Approach.WAIT
    claim = hello.claim
    return service.hello(claim.scheduler_id, claim.term, approach, hello.protocols, claim.address)


def messages_of(service: SimulatedService, outgoing: Outgoing) -> list[FromExecutor]:
    """Return what a scheduler reads of it; raises the LinkError by which a stream ends."""
    match outgoing:
        case StepResult():
            return [outgoing]
        case Beat(running_step_id, running_ns):
            return [Heartbeat(running_step_id, running_ns)]
        case Accepted(description, snapshot, protocol):
            # One request each, so that joining is exercised.
            rows = (SnapshotPart(rows=(row,)) for row in snapshot.rows)
            last = SnapshotPart(tags=snapshot.tags, num_parts=len(snapshot.rows) + 1)
            return [_welcome(service, description, protocol), *rows, last]
        case InLine(holder):
            return [WaitingInLine(holder)]
        case Draining(reason):
            return [Drain(reason)]
        case Ended():
            raise _error(outgoing)


def _welcome(service: SimulatedService, description: ExecutorDescription, protocol: int) -> Welcome:
    config = service.executor.config
    return Welcome(
        incarnation=description.incarnation,
        epoch=description.epoch,
        protocol=protocol,
        model=Model(
            name=config.model,
            architecture="simulated",
            max_model_len=config.max_model_len,
            vocab_size=config.tokens.vocab_size,
            end_token_ids=END_TOKEN_IDS,
            has_chat_template=True,
        ),
        geometry=KvGeometry(config.num_blocks, config.block_size, dtype="token ids"),
        limits=ExecutorLimits(
            config.max_num_rows, config.max_num_batched_tokens, config.max_model_len, config.max_plans_in_flight
        ),
        tag_key=config.tag_key,
        tokenizer_digest=TOKENIZER_SOURCE.digest,
        step_points=config.step_points,
        failed_step=description.failed_step,
    )


def _error(ended: Ended) -> LinkError:
    if ended.end is StreamEnd.SUPERSEDED:
        return TermSupersededError(Holder(ended.holder.scheduler_id, ended.holder.term, ended.holder.address))
    sentence = f"{ended.end.value}: {ended.detail}"
    return ProtocolMismatchError(sentence) if ended.end is StreamEnd.PROTOCOL else StreamEndedError(sentence)
