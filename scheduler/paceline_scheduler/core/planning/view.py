"""What planning sees of one executor, and what it finds there of a request's tokens."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import RecordId
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.growth import Int64Array, OutputLengths
from paceline_scheduler.core.planning.speculation import Speculation
from paceline_scheduler.core.planning.step_time import StepTimeModel
from paceline_scheduler.core.tables.blocks import BlockPool
from paceline_scheduler.core.tables.rows import RowColumns, RowIndex


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """Read after `settle` has released what ended."""

    description: ExecutorDescription
    rows: RowColumns
    pool: BlockPool
    step_time: StepTimeModel
    output_lengths: OutputLengths
    speculation: Speculation
    leaving_keys: Set[RecordId]  # an older placement of these still leaves
    suspect_rows: Set[int] = frozenset()  # they run in steps of their own
    is_doubted: bool = False  # the last step, of one request, failed: others go first
    version: tuple[int, ...] = ()  # of rows and blocks: what plans, `settle`, results and ends of rows have come to

    @property
    def num_plans(self) -> int:
        return self.version[0]

    def expected_rest(self, running: RowIndex) -> Int64Array:
        num_output = (self.rows.num_known[running] - self.rows.num_prompt[running]).astype(np.int64)
        at_most = np.maximum((self.rows.limit[running] + 1 - self.rows.num_known[running]).astype(np.int64), 0)
        return self.output_lengths.expected_rest(num_output, at_most)


def siblings(view: ExecutorView, live: LiveRequest) -> list[int]:
    """Rows of other completions of its request."""
    if live.request.num_completions == 1:
        return []
    whole = live.request.key.whole
    return [row for row in view.rows.running().tolist() if view.rows.live_on(row).request.key.whole == whole]


def find_hits(view: ExecutorView, live: LiveRequest) -> tuple[int, ...]:
    """At least one token is left to compute."""
    if live.computes_all:
        return ()
    description = view.description
    chain = live.prefix_chain(description.tag_key, description.block_size)
    known = live.known_token_ids()
    hits = []
    for index in range((len(known) - 1) // description.block_size):
        block = view.pool.find(chain.key(index, known))
        if block is None:
            break
        hits.append(block)
    return tuple(hits)


def num_cached_on(views: Sequence[ExecutorView], live: LiveRequest) -> list[int]:
    """Tokens. Most prefix caches lack the first block already."""
    firsts: dict[tuple[bytes, int], bytes] = {}
    counts = [0] * len(views)
    for index, view in enumerate(views):
        tag_key, block_size = form = view.description.tag_key, view.description.block_size
        if form not in firsts and live.num_known_tokens > block_size:
            firsts[form] = live.prefix_chain(tag_key, block_size).key(0, live.known_token_ids())
        if form in firsts and view.pool.find(firsts[form]) is not None:
            counts[index] = len(find_hits(view, live)) * block_size
    return counts
