"""Tells a request that makes steps fail from an executor whose steps fail whatever is in them.

Refuses to know why they failed and who drives.
"""

from collections.abc import Iterator

from paceline.plan.values import BatchPlan, NewRequest, RecordId
from paceline_executor.errors import DeviceError
from paceline_executor.rows.table import RowTable

MAX_BLAMED = 2
"""Two bad requests can come together, and a client must not be able to end the process with them."""


class FailureAttribution:
    """Steps that failed in a row with one request each, or none."""

    def __init__(self) -> None:
        self._blamed: list[RecordId | None] = []  # no request twice, whatever the completion; None: the plan ran none

    def succeeded(self, plan: BatchPlan) -> None:
        if plan.rows.size:
            self._blamed.clear()

    def failed(self, plan: BatchPlan, table: RowTable) -> None:
        """Raises DeviceError when more requests failed alone than can be at fault."""
        if plan.rows.size > 1:
            return
        alone = request_alone(plan, table)
        record_id = None if alone is None else alone.record_id
        if any(_are_one_request(record_id, blamed) for blamed in self._blamed):
            return
        self._blamed.append(record_id)
        if len(self._blamed) > MAX_BLAMED:
            names = ", ".join("none" if blamed is None else repr(blamed.request_id) for blamed in self._blamed)
            raise DeviceError(
                f"{len(self._blamed)} steps in a row failed, each with a different request alone in it "
                f"({names}): the fault is this executor's, so it ends; its log says why"
            )


def _are_one_request(one: RecordId | None, other: RecordId | None) -> bool:
    return one is not None and other is not None and (one.tenant, one.request_id) == (other.tenant, other.request_id)


def request_alone(plan: BatchPlan, table: RowTable) -> NewRequest | None:
    """Return the only request of a plan; None where there are none or several."""
    return next(requests_of(plan, table), None) if plan.rows.size == 1 else None


def requests_of(plan: BatchPlan, table: RowTable) -> Iterator[NewRequest]:
    """Yield the requests of a plan's rows, which it may have placed itself."""
    placed = {placement.row: placement for placement in plan.new_requests}
    for row in plan.rows.tolist():
        request = placed.get(row) or table.placement_on(row)
        if request is not None:
            yield request
