"""Who gives way where blocks run out, in the pool or in a tenant's share."""

from collections.abc import Iterable, Set

import numpy as np

from paceline_scheduler.core.planning.capacity import ExecutorView, is_protected
from paceline_scheduler.core.planning.shares import Shares
from paceline_scheduler.core.tables.rows import RowColumns, RowIndex


def fit_blocks(
    view: ExecutorView, decode_rows: RowIndex, leaving: tuple[int, ...]
) -> tuple[tuple[int, ...], RowIndex, int]:
    """Preempts until every decoding row has its block. Returns preempted rows, decoding rows and the available blocks
    before these grow.
    """
    rows = view.rows
    num_available = view.pool.num_available + sum(view.pool.num_freed_by(rows.tables[row]) for row in leaving)
    if len(decode_rows) <= num_available:
        return (), decode_rows, num_available
    needy = decode_rows[rows.num_scheduled[decode_rows] >= rows.num_slots[decode_rows]]
    if len(needy) <= num_available:
        return (), decode_rows, num_available
    # What leaves gives its blocks already, and comes back to nobody here.
    victims = () if leaving else _victims(rows, rows.running(), set(needy.tolist()))
    preempted, sitting_out = _make_room(view, needy, victims, num_available)
    num_available += sum(view.pool.num_freed_by(rows.tables[row]) for row in preempted)
    return preempted, decode_rows[~np.isin(decode_rows, [*preempted, *sitting_out])], num_available


def fit_shares(
    view: ExecutorView, shares: Shares, decode_rows: RowIndex, leaving: tuple[int, ...]
) -> tuple[tuple[int, ...], RowIndex]:
    """The same inside of each tenant's share. Returns preempted and decoding rows."""
    given_up: list[int] = []
    sitting_out: list[int] = []
    rows = view.rows
    for tenant, all_rows in shares.rows_of.items():
        running = np.array([row for row in all_rows if row not in leaving], dtype=np.intp)
        decoding = running[np.isin(running, decode_rows)]
        needy = decoding[rows.num_scheduled[decoding] >= rows.num_slots[decoding]]
        room = shares.room(tenant, len(needy))
        if len(needy) <= room:
            continue
        preempted, without = _make_room(view, needy, _victims(rows, running, set(needy.tolist())), room)
        given_up += preempted
        if len(running) > len(preempted) + 1:  # else it is alone
            sitting_out += without
    if not (given_up or sitting_out):
        return (), decode_rows
    return tuple(given_up), decode_rows[~np.isin(decode_rows, [*given_up, *sitting_out])]


def _make_room(
    view: ExecutorView, needy: RowIndex, victims: Iterable[int], num_available: int
) -> tuple[tuple[int, ...], list[int]]:
    """Returns preempted rows, and the least urgent ones that have no block yet and sit out."""
    preempted: list[int] = []
    needing = set(needy.tolist())
    for row in victims:
        if len(needing) <= num_available:
            break
        preempted.append(row)
        needing.discard(row)
        num_available += view.pool.num_freed_by(view.rows.tables[row])
    left = view.rows.by_urgency(np.array(sorted(needing), dtype=np.intp))
    return tuple(preempted), left[max(0, num_available) :].tolist()


def _victims(rows: RowColumns, among: RowIndex, needing: Set[int]) -> list[int]:
    """The least urgent row is first. For the one request that was preempted too often (see `FreeBlocks`) everybody else
    gives way. Otherwise the most urgent stays, so that somebody always progresses.
    """
    running = rows.by_urgency(among).tolist()
    victims = [row for row in reversed(running) if not is_protected(rows.live_on(row))]
    if not victims and needing >= set(running):
        return list(reversed(running[1:]))  # all stand still: better a fourth preemption than a deadlock
    if any(is_protected(rows.live_on(row)) for row in needing) or not victims:
        return victims
    return victims if victims[-1] != running[0] else victims[:-1]
