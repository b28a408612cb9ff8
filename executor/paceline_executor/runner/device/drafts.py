"""The seam between a device's steps and whoever drafts in front of them; prompt lookup behind it.

Knows which rows may have drafts in a step. Refuses to know how they are verified.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_executor.limits import RowLimits
from paceline_executor.runner.device.device import Captured, Device, Uncaptured
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.interface import Int32Array
from paceline_kernels.decoder import AuxHidden
from paceline_kernels.prompt_lookup import lookup_drafts
from paceline_kernels.sampling import RuleTable
from paceline_kernels.step_inputs import PlanColumns


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """As far as the host knows: rows in flight may have fewer known tokens, or have ended."""

    rows: Int32Array  # [num_wanting] of the executor
    num_known: Int32Array  # [num_wanting] at most
    num_wanted: Int32Array  # [num_wanting], at least 1
    spare_ns: int = 0  # what computing that lacks of rows may take, beside their drafts


class StatesObserver(Protocol):
    def states(self, num_tokens: int) -> AuxHidden:
        """Where a step of so many tokens is to put them."""
        ...

    def observe(self, aux: AuxHidden, slot_mapping: torch.Tensor) -> None: ...


class Drafting(Protocol):
    """Puts drafts behind known tokens and counts them as held: at most as many as more tokens are planned."""

    @property
    def max_drafts(self) -> int:
        """Of a row and step."""
        ...

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Those of its own whose second dimension is the target's blocks."""
        ...

    @property
    def observer(self) -> StatesObserver | None:
        """It sees all steps of the target."""
        ...

    def tell(self, rows: Int32Array) -> None:
        """These rows are described anew."""
        ...

    def capture(self, plan: Captured[PlanColumns], num_rows: int) -> None:
        """For steps of so many planned rows."""
        ...

    def launch(self, plan: Captured[PlanColumns], num_rows: int, wanted: WantedDrafts, rules: RuleTable | None) -> None:
        """Behind the launch of `plan`. rules: None where no planned row has any."""
        ...


class NoDrafting:
    max_drafts = 0
    block_tensors = ()
    observer = None

    def tell(self, rows: Int32Array) -> None:
        """See Drafting."""

    def capture(self, plan: Captured[PlanColumns], num_rows: int) -> None:
        """See Drafting."""

    def launch(self, plan: Captured[PlanColumns], num_rows: int, wanted: WantedDrafts, rules: RuleTable | None) -> None:
        """See Drafting."""


class DeviceDrafter(Protocol):
    """One that takes a launch or two, and looks at the rows alone."""

    def draft(self, rows: RowWords, plan: PlanColumns) -> None: ...


class LookupDrafter:
    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        lookup_drafts(rows.state, rows.draws, plan, self._max_drafts, rows.min_chance)


class LaunchedDrafter:
    """See Drafting."""

    block_tensors = ()
    observer = None

    def __init__(self, drafter: DeviceDrafter, device: Device, rows: RowWords, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._drafter = drafter
        self._device = device
        self._rows = rows
        self._graphs: dict[int, Captured[None]] = {}

    def tell(self, rows: Int32Array) -> None:
        """Its rows say all."""

    def capture(self, plan: Captured[PlanColumns], num_rows: int) -> None:
        self._graphs[num_rows] = self._device.capture(self._drafting(plan))

    def launch(self, plan: Captured[PlanColumns], num_rows: int, wanted: WantedDrafts, rules: RuleTable | None) -> None:  # noqa: ARG002  a lookup needs neither
        drafted = self._graphs.get(num_rows) or Uncaptured(self._device, self._drafting(plan))
        drafted.replay()

    def _drafting(self, plan: Captured[PlanColumns]) -> Callable[[], None]:
        return lambda: self._drafter.draft(self._rows, plan.outputs)


MakeDrafting = Callable[[Device, RowWords], Drafting]


def launching(drafter: DeviceDrafter, max_drafts: int) -> MakeDrafting:
    return lambda device, rows: LaunchedDrafter(drafter, device, rows, max_drafts)


def lookups(limits: RowLimits) -> MakeDrafting:
    """None where rows are not drafted for."""
    max_drafts = limits.max_num_draft_tokens
    return launching(LookupDrafter(max_drafts), max_drafts) if max_drafts else lambda _device, _rows: NoDrafting()
