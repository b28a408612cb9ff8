"""A scheduler that plans at random but within the rules, and a runner that fails where it is told to.

Refuses to know how rows are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from executor_rig.hash_runner import HashRunner, next_token
from executor_rig.plans import Cell, placement, plan
from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import BatchPlan, NewRequest, RowFinish, RowState, StepResult
from paceline_executor.limits import RowLimits
from paceline_executor.runner.interface import Int32Array, StepBatch, StepHandle, output_of
from paceline_executor.runner.row_rules import NO_TOKENS

LIMITS = RowLimits(num_rows=3, max_model_len=24, max_num_batched_tokens=16, num_blocks=14, block_size=4, vocab_size=50)


@dataclass
class Request:
    """Includes what is assumed while results are on their way."""

    name: str
    prompt: list[int]
    max_tokens: int
    end_token: int
    output: list[int] = field(default_factory=list)
    finish: int = RowFinish.GOES_ON
    num_computed: int = 0  # once all planned steps are done
    num_expected: int = 0  # once all planned steps are done
    blocks: list[int] = field(default_factory=list)
    is_last_block_shared: bool = False  # it must be copied before this request writes to it

    def reference(self) -> list[int]:
        """Computes it without rows and blocks."""
        tokens = list(self.prompt)
        while True:
            offset = len(tokens) - len(self.prompt)
            tokens.append(next_token(tokens, 0, offset, LIMITS.vocab_size))
            if tokens[-1] == self.end_token or offset + 1 == self.max_tokens or len(tokens) == LIMITS.max_model_len:
                return tokens[len(self.prompt) :]

    @property
    def num_ahead(self) -> int:
        """Known tokens that no planned step computes yet."""
        return len(self.prompt) + self.num_expected - self.num_computed

    def num_in_common(self, other: "Request") -> int:
        computed = other.prompt[: other.num_computed]
        num_equal = next((i for i, (a, b) in enumerate(zip(self.prompt, computed, strict=False)) if a != b), 99)
        return min(num_equal, len(computed), len(self.prompt) - 1)


@dataclass
class _Cells:
    grants: list[Cell] = field(default_factory=list)
    shared: list[Cell] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Plans ahead of results; it also shares, tags and preempts.

    max_num_drafts: of a row and step.
    """

    def __init__(
        self, random: Random, requests: list[Request], max_num_drafts: int = 0, limits: RowLimits = LIMITS
    ) -> None:
        self.random = random
        self.max_num_drafts = max_num_drafts
        self.limits = limits
        self.requests = {request.name: request for request in requests}
        self.waiting = list(requests)
        self.running: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self.remembered: set[str] = set()  # finished requests whose records the executor keeps
        self.step_id = 0
        self.epoch = 1
        self.grant_hash = HASH_START

    @property
    def is_done(self) -> bool:
        return not (self.waiting or self.running or self.leaving)

    @property
    def free_blocks(self) -> list[int]:
        held = {block for request in self.running.values() for block in request.blocks}
        return [block for block in range(self.limits.num_blocks) if block not in held]

    def plan(self) -> BatchPlan:
        self.step_id += 1
        finish, preempt = self._release()
        free_rows = [row for row in range(self.limits.num_rows) if row not in {**self.running, **self.leaving}]
        sources = list(self.running.values())
        cells = _Cells()
        place = [self._place(row, sources, cells) for row in free_rows if self.waiting]
        tagged = [block for block in range(self.limits.num_blocks) if self.random.random() < 0.05]
        forget = [name for name in sorted(self.remembered) if self.random.random() < 0.1]
        self.remembered -= set(forget)
        scheduled = self._schedule(cells, place)
        drafts = [num_drafts for _, _, num_drafts in scheduled]
        return plan(
            [(row, num_tokens) for row, num_tokens, _ in scheduled],
            drafts=drafts if any(drafts) else (),
            step_id=self.step_id,
            epoch=self.epoch,
            place=place,
            tags=[(block, self.random.randbytes(16)) for block in tagged],
            preempt=preempt,
            finish=finish,
            forget=forget,
            grants=cells.grants,
            shared=cells.shared,
            copies=cells.copies,
        )

    def take(self, planned: BatchPlan, result: StepResult) -> None:
        """Also takes the confirmation that rows have left."""
        self.grant_hash = grant_hash(grant_hash(self.grant_hash, planned.grants), planned.shared)
        if result.grant_hash != self.grant_hash:
            raise AssertionError("the hashes of grants differ")
        tokens = iter(result.token_ids.tolist())
        for row, count, finish in zip(result.rows.tolist(), result.num_accepted, result.finishes, strict=True):
            request = {**self.running, **self.leaving}[row]
            request.output += [next(tokens) for _ in range(count)]
            request.finish = int(finish)
        self._settle(planned, result)
        for release in planned.releases:
            request = self.leaving.pop(release.row)
            if request.finish:
                self.remembered.add(request.name)
            else:
                self.waiting.append(request)

    def _settle(self, planned: BatchPlan, result: StepResult) -> None:
        """Drafts that were not accepted did not come."""
        if result.num_draft_tokens.size != planned.num_draft_tokens.size:
            raise AssertionError("the result does not tell the drafts of every row")
        columns = (result.rows, planned.num_draft_tokens, result.num_draft_tokens, result.num_accepted)
        for row, granted, verified, accepted in zip(*(column.tolist() for column in columns), strict=False):
            if not max(0, accepted - 1) <= verified <= granted:
                raise AssertionError(f"{accepted} tokens came of {verified} drafts, where {granted} were granted")
            if accepted:
                request = {**self.running, **self.leaving}[row]
                request.num_expected -= granted + 1 - accepted
                request.num_computed -= granted + 1 - accepted

    def rebuild(self, states: Sequence[RowState]) -> None:
        """As a successor does: everything from the snapshot."""
        self.running.clear()
        self.leaving.clear()
        self.step_id, self.epoch = 0, self.epoch + 1
        self.remembered = {state.record_id.request_id for state in states if state.row is None and state.finish}
        for state in states:
            request = self.requests[state.record_id.request_id]
            request.output, request.blocks = state.output_token_ids.tolist(), state.block_ids.tolist()
            request.num_expected, request.num_computed = len(request.output), state.num_computed_tokens
            request.finish = int(state.finish)
            # A copy too many does no harm.
            request.is_last_block_shared = request.num_computed % self.limits.block_size > 0
            if state.row is not None:
                self.running[state.row] = request
        self.waiting = [r for r in self.requests.values() if r not in self.running.values() and not r.finish]

    def _release(self) -> tuple[list[tuple[int, int]], list[int]]:
        finish: list[tuple[int, int]] = []
        preempt: list[int] = []
        for row, request in list(self.running.items()):
            if request.finish:
                finish.append((row, len(request.output)))
            elif self.random.random() < 0.05:
                preempt.append(row)
            else:
                continue
            self.leaving[row] = self.running.pop(row)
        return finish, preempt

    def _place(self, row: int, sources: Sequence[Request], cells: "_Cells") -> NewRequest:
        """On as much of what another request computed as they have in common."""
        request = self.waiting.pop(0)
        source = max(sources, key=request.num_in_common, default=request)
        request.num_computed, request.num_expected = 0, len(request.output)
        num_shared, num_copied = divmod(request.num_in_common(source), self.limits.block_size)
        request.blocks = source.blocks[:num_shared]
        cells.shared += [(row, i, block) for i, block in enumerate(request.blocks)]
        self.running[row] = request
        free = self.free_blocks
        request.is_last_block_shared = num_copied > 0 and self.random.random() < 0.5
        if request.is_last_block_shared:
            cells.shared.append((row, num_shared, source.blocks[num_shared]))
            request.blocks = source.blocks[: num_shared + 1]
            request.num_computed = num_copied
        elif num_copied and free:
            cells.grants.append((row, num_shared, free[0]))
            cells.copies.append((source.blocks[num_shared], free[0]))
            request.blocks = [*request.blocks, free[0]]
            request.num_computed = num_copied
        request.num_computed += num_shared * self.limits.block_size
        return placement(
            row,
            request.prompt,
            name=request.name,
            output=request.output,
            num_cached_tokens=request.num_computed,
            max_tokens=request.max_tokens,
            end_token_ids=[request.end_token],
        )

    def _num_drafts(self, request: Request, budget: int) -> int:
        num_known = len(request.prompt) + request.num_expected
        room = min(request.max_tokens - request.num_expected, self.limits.max_model_len - num_known) - 1
        return self.random.randint(0, max(0, min(self.max_num_drafts, room, budget)))

    def _schedule(self, cells: "_Cells", place: Sequence[NewRequest]) -> list[tuple[int, int, int]]:
        """Returns rows, how many tokens each computes, and how many of these are drafts."""
        scheduled: list[tuple[int, int, int]] = []
        budget = self.limits.max_num_batched_tokens
        placed = [placement.row for placement in place]
        given_up: set[int] = set()
        for row, request in self.running.items():
            most = min(request.max_tokens, self.limits.max_model_len - len(request.prompt))
            is_over = request.num_expected >= most or request.num_ahead == 0
            num_tokens = self.random.randint(0, min(request.num_ahead, budget))
            num_drafts = self._num_drafts(request, budget - num_tokens) if num_tokens == request.num_ahead else 0
            num_tokens += num_drafts if num_tokens else 0
            needed = -(-(request.num_computed + num_tokens) // self.limits.block_size) - len(request.blocks)
            free = [block for block in self.free_blocks if block not in given_up]
            needs_copy = request.is_last_block_shared
            if is_over or num_tokens == 0 or max(0, needed) + needs_copy > len(free) or (needs_copy and row in placed):
                continue
            if needs_copy:
                shared = request.blocks.pop()
                given_up.add(shared)  # until the next plan: this one still copies from it
                cells.grants.append((row, len(request.blocks), free[0]))
                cells.copies.append((shared, free[0]))
                request.blocks.append(free.pop(0))
                request.is_last_block_shared = False
            for block in free[: max(needed, 0)]:
                cells.grants.append((row, len(request.blocks), block))
                request.blocks.append(block)
            request.num_expected += num_drafts + 1 if num_tokens - num_drafts == request.num_ahead else 0
            request.num_computed += num_tokens
            budget -= num_tokens
            scheduled.append((row, num_tokens, num_drafts))
        return scheduled


class FragileRunner(HashRunner):
    """The next step fails in the given place, be it after some of the work is done."""

    fails_in = ""

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        super().copy_blocks(sources, destinations)
        self._fail("copy")

    def launch(self, batch: StepBatch) -> StepHandle:
        """It may also give an answer that does not fit the batch; where all rows have ended, no pass can fail."""
        num_steps = self.num_steps
        output = super().launch(batch)
        if self.num_steps > num_steps:
            self._fail("forward pass")
        if self.fails_in == "output" and batch.sampled.size:
            self.fails_in = ""
            return replace(output_of(output), token_ids=NO_TOKENS)
        return output

    def twin(self) -> "FragileRunner":
        runner = FragileRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
        runner._slots[:], runner._digests[:] = self._slots, self._digests
        return runner

    def _fail(self, place: str) -> None:
        if self.fails_in == place:
            self.fails_in = ""
            raise RuntimeError("device lost")
