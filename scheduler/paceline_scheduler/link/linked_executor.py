"""What the links know of each executor beyond what the core does, and how it looks from outside."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from paceline.forms.library import LIBRARY
from paceline.plan.hashes import TOKENIZER_FORM, tokenizer_form
from paceline.plan.values import Model
from paceline_scheduler.backend import ExecutorStatus, ServedModel, TokenizerSource
from paceline_scheduler.core.tables.blocks import BlockCounts
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.link.executor_record import ExecutorRecord, LinkPhase
from paceline_scheduler.link.link_listener import PlanPort
from paceline_scheduler.observers.steps import StepTotals


class ShownState(IntEnum):
    """The numbers are those of paceline.v1.ExecutorState."""

    CONNECTING = 1
    SYNCING = 2
    READY = 3
    DRAINING = 4
    LOST = 5


@dataclass(slots=True)
class LinkedExecutor:
    """Everything optional is unset until the first welcome."""

    away_since_s: float
    """When its latest stream ended, or the search began; of no meaning while it has one."""
    last_error: str = ""
    model: Model | None = None
    tokenizer: TokenizerSource | None = None
    port: PlanPort | None = None

    def give_up(self, reason: str) -> None:
        self.port = self.model = None
        self.last_error = reason


def served_models(executors: Iterable[LinkedExecutor]) -> tuple[ServedModel, ...]:
    """Sorted by name; shared fields are the last one's, the tokenizer that of the newest form."""
    served: dict[str, ServedModel] = {}
    for executor in executors:
        model, tokenizer = executor.model, executor.tokenizer
        if model is None or tokenizer is None:
            continue
        others = served.get(model.name)
        served[model.name] = ServedModel(
            name=model.name,
            architecture=model.architecture,
            max_model_len=max(model.max_model_len, others.max_model_len if others else 0),
            vocab_size=model.vocab_size,
            num_executors=1 + (others.num_executors if others else 0),
            num_parameters=model.num_parameters,
            quantization=model.quantization,
            tokenizer=tokenizer if others is None else _newer(tokenizer, others.tokenizer),
            has_dummy_weights=model.has_dummy_weights,
            weight_bytes=max(model.weight_bytes, others.weight_bytes if others else 0),
            weights_digest=model.weights_digest or (others.weights_digest if others else ""),
            num_ranks=max(model.num_ranks, others.num_ranks if others else 0),
            structured_output=_usable(model.structured_output, others.structured_output if others else ""),
        )
    return tuple(served[name] for name in sorted(served))


def _usable(library: str, other: str) -> str:
    """Requests with a form run where it is the one that forms are checked with here."""
    return other if other == LIBRARY or not library else library


def _newer(tokenizer: TokenizerSource, other: TokenizerSource) -> TokenizerSource:
    """Executors of several releases serve a model during an upgrade: the newest that is known here knows best how its
    files are meant. A form beyond that cannot be checked, and whoever claims it decides nothing for the others.
    """
    forms = [tokenizer_form(each.digest) for each in (tokenizer, other)]
    ours, theirs = (form if form <= TOKENIZER_FORM else 0 for form in forms)
    return other if ours < theirs else tokenizer


def status(
    record: ExecutorRecord, executor: LinkedExecutor, views: CoreViews, steps: StepTotals, now_s: float
) -> ExecutorStatus:
    address, description = record.address, views.description(record.address)
    state = _state(record, is_draining=views.drains(address))
    counts = None if description is None else views.counts(address)
    blocks = counts.blocks if counts else BlockCounts(0, 0, 0, 0)
    return ExecutorStatus(
        address=address,
        state=state,
        incarnation=description.incarnation if description else 0,
        epoch=description.epoch if description else 0,
        model=description.model if description else "",
        num_running_requests=counts.num_running_requests if counts else 0,
        num_total_blocks=blocks.total,
        num_free_blocks=blocks.free,
        num_cached_blocks=blocks.cached,
        num_used_blocks=blocks.used,
        num_quarantined_blocks=blocks.total - blocks.free - blocks.cached - blocks.used,
        num_filled_slots=counts.num_filled_slots if counts else 0,
        num_owned_slots=counts.num_owned_slots if counts else 0,
        num_plans_in_flight=counts.num_plans_in_flight if counts else 0,
        last_error=executor.last_error,
        steps=steps,
        holder=record.holder,
        max_num_rows=description.max_num_rows if description else 0,
        draft_speedup=counts.draft_speedup if counts and steps.drafts.num_verified else 0.0,
        draft_saved_ns=counts.draft_saved_ns if counts else 0,
        lost_for_s=now_s - executor.away_since_s if state is ShownState.LOST else None,
        num_ranks=0 if executor.model is None else executor.model.num_ranks,
    )


def _state(record: ExecutorRecord, *, is_draining: bool) -> ShownState:
    if record.is_syncing:
        return ShownState.SYNCING
    match record.phase:
        case LinkPhase.DRIVEN:
            return ShownState.DRAINING if is_draining else ShownState.READY
        case LinkPhase.LOST | LinkPhase.YIELDED:
            return ShownState.LOST
        case _:
            return ShownState.CONNECTING
