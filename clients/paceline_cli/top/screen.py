"""The screen as lines: a pure function of what is known, what is selected, and the size.

No line is wider than the screen, whatever names and sentences say; there are no more lines than it has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from paceline_cli.top.cells import cut, cut_front, harmless, left, right, width_of, wrap
from paceline_cli.top.controls import LIMITS, Controls
from paceline_cli.top.state import Rates, TopState
from paceline_cli.top.values import Executor, ExecutorState, Overview, Request
from paceline_client.results import RequestState

OLD_S = 3.0
"""An answer that is older is told to be, beyond the time between two."""

KEYS = "q quit  e explain  c cancel  d drain  u undrain  l limits  s show  h help"
_MAX_NOTE_LINES = 8
_SHARES = (0.5, 0.99)
_WIDEST_ADDRESS = 40


class Part(NamedTuple):
    """A piece of a line. `style` is one of the names that `terminal` knows, or empty."""

    style: str
    text: str


Line = tuple[Part, ...]
ItemT = TypeVar("ItemT")

_STATE_STYLES = {
    ExecutorState.READY: "good",
    ExecutorState.LOST: "bad",
    RequestState.RUNNING: "good",
    RequestState.WAITING: "warn",
    RequestState.PREEMPTED: "warn",
}


def draw(state: TopState, controls: Controls, width: int, height: int, now_s: float) -> list[Line]:
    """Return `height` lines, each of at most `width` cells; what the keys asked for and mean is at the lower end."""
    below = [*_note(controls, state.overview, width), (Part("dim", cut(KEYS, width)),)]
    above = tables(state, controls, width, max(0, height - len(below)), now_s)
    return [*above, *[()] * (height - len(above) - len(below)), *below][:height]


def tables(
    state: TopState, controls: Controls, width: int, height: int, now_s: float, *, in_full: bool = False
) -> list[Line]:
    """Return at most `height` lines, each of at most `width` cells.

    `in_full`: below a row stands what it has no place for, why an executor is lost and what a request waits for, as
    nobody can select it.
    """
    executors, requests = state.overview.executors, controls.requests(state.overview)
    top = _summary(state, width, now_s)
    num_free = max(0, height - len(top) - 4)  # for what is no title and no empty line
    num_executors = min(len(executors), max(1, num_free - min(len(requests), num_free // 2)))
    lines = [
        *top,
        (),
        *_executor_table(executors, state.rates, controls, width, num_executors, in_full=in_full),
        (),
        *_request_table(
            requests, controls, state.overview.has_more, width, max(0, num_free - num_executors), in_full=in_full
        ),
    ]
    return lines[:height]


def plain(lines: Sequence[Line]) -> str:
    """Return lines as text, without colours and blanks at their ends."""
    return "\n".join("".join(part.text for part in line).rstrip() for line in lines) + "\n"


def _summary(state: TopState, width: int, now_s: float) -> list[Line]:
    overview = state.overview
    num_running = sum(executor.num_rows for executor in overview.executors)
    first, between = (window.quantiles(now_s, _SHARES) for window in (state.first_tokens, state.gaps))
    lines = [
        f"running {num_running}  waiting {overview.num_waiting_requests} ({overview.num_waiting_tokens:,} tokens)"
        f"  {state.tokens_per_s:,.0f} tokens/s{_drafts(overview.executors)}",
        f"ms in 60 s:  first token p50 {_ms(first[0])} p99 {_ms(first[1])}"
        f"  between tokens p50 {_ms(between[0])} p99 {_ms(between[1])}",
        f"refused {_counts(overview.refusals)}  recovered {_counts(overview.recoveries)}"
        + (f"  steps not seen {state.num_unseen_steps:,}" if state.num_unseen_steps else ""),
    ]
    return [_title(state, width, now_s), *((Part("", cut(harmless(line), width)),) for line in lines)]


def _title(state: TopState, width: int, now_s: float) -> Line:
    age_s = 0.0 if state.updated_s is None else now_s - state.updated_s
    if state.trouble:
        style, status = "bad", f"lost, looking for the active server: {state.trouble}"
    elif state.updated_s is None:
        style, status = "warn", "looking for the active server"
    elif state.overview.holder:
        style, status = "warn", f"stands by: {state.overview.holder} drives the executors"
    elif age_s > OLD_S:
        style, status = "warn", f"as of {_age(age_s)} ago"
    else:
        style, status = "good", "live"
    name = cut(f"paceline top  {harmless(state.server)}".rstrip() + "  ", width)
    return Part("bold", name), Part(style, cut(harmless(status), width - width_of(name)))


class _Column(NamedTuple):
    title: str
    width: int
    is_left: bool = False

    def cell(self, text: str) -> str:
        return left(text, self.width) if self.is_left else right(text, self.width)


_EXECUTOR_COLUMNS = (
    _Column("STATE", 8, is_left=True),
    _Column("ROWS", 7),
    _Column("STEP", 5),
    _Column("PRED", 5),
    _Column("PLAN", 4),
    _Column("STRV", 4),
    _Column("TOK/S", 6),
    _Column("USED", 4),
    _Column("CACH", 4),
    _Column("FREE", 4),
)
_REQUEST_COLUMNS = (
    _Column("TENANT", 8, is_left=True),
    _Column("STATE", 9, is_left=True),
    _Column("PROMPT", 6),
    _Column("OUTPUT", 9),
    _Column("AGE", 6),
)


def _executor_table(
    executors: Sequence[Executor],
    rates: Mapping[str, Rates],
    controls: Controls,
    width: int,
    num_rows: int,
    *,
    in_full: bool,
) -> list[Line]:
    fixed = sum(column.width + 1 for column in _EXECUTOR_COLUMNS) + 1
    name_width = max(8, min(_WIDEST_ADDRESS, width - fixed))
    titles = "".join(f" {column.cell(column.title)}" for column in _EXECUTOR_COLUMNS)
    shown, where = _around(executors, controls.selected, lambda one: one.address, num_rows)
    lines: list[Line] = [(Part("head", cut(left(f" EXECUTOR{where}", name_width + 1) + titles, width)),)]
    for executor in shown:
        name = left(cut_front(harmless(executor.address), name_width), name_width)
        texts = _executor_texts(executor, rates.get(executor.address, Rates()))
        cells = [column.cell(text) for column, text in zip(_EXECUTOR_COLUMNS, texts, strict=True)]
        lines.append(_row(name, cells, _STATE_STYLES.get(executor.state, "warn"), 0, executor.address, controls, width))
        if in_full and executor.state is ExecutorState.LOST:
            lines += _below(_loss(executor), width)
    return lines


def _loss(executor: Executor) -> str:
    """Since when, and why."""
    since = "" if executor.lost_for_s is None else f" for {_age(executor.lost_for_s)}"
    return f"lost{since}: {executor.last_error or 'it has not answered yet'}"


def _below(sentence: str, width: int) -> list[Line]:
    return [(Part("dim", cut(f"   {line}", width)),) for line in wrap(harmless(sentence), max(1, width - 3))]


def _executor_texts(executor: Executor, rates: Rates) -> tuple[str, ...]:
    blocks = executor.blocks
    return (
        executor.state.value,
        f"{executor.num_rows}/{executor.max_num_rows}",
        _ms(rates.step_s),
        _ms(rates.predicted_s),
        _ms(rates.planning_s),
        f"{100 * rates.starved_share:.0f}%",
        f"{rates.tokens_per_s:,.0f}",
        *(_share(part, blocks.total) for part in (blocks.used, blocks.cached, blocks.free)),
    )


def _request_table(
    requests: Sequence[Request], controls: Controls, has_more: bool, width: int, num_rows: int, *, in_full: bool
) -> list[Line]:
    fixed = sum(column.width + 1 for column in _REQUEST_COLUMNS)
    id_width = max(8, min(32, 12 + max(0, width - 100)))
    rest_width = max(0, width - fixed - id_width - 2)
    titles = "".join(f" {column.cell(column.title)}" for column in _REQUEST_COLUMNS)
    shown, where = _around(requests, controls.selected, lambda one: one.key, num_rows)
    where = where + "+" if where and has_more else where
    head = left(" REQUEST", id_width + 1) + titles + (f" ON, FOR{where}" if where else " ON, WAITS FOR")
    lines: list[Line] = [(Part("head", cut(head, width)),)]
    for request in shown:
        key = request.key
        name = left(harmless(key.request_id + (f"/{key.index}" if key.index else "")), id_width)
        cells = [column.cell(text) for column, text in zip(_REQUEST_COLUMNS, _request_texts(request), strict=True)]
        why = harmless(request.waiting_for or request.executor)
        is_below = in_full and width_of(why) > rest_width
        cells.append("" if is_below else cut(why, rest_width))
        lines.append(_row(name, cells, _STATE_STYLES.get(request.state, ""), 1, key, controls, width))
        if is_below:
            lines += _below(why, width)
    if not requests:
        lines.append((Part("dim", cut(f" no {controls.shown.value}", width)),))
    return lines


def _request_texts(request: Request) -> tuple[str, ...]:
    bound = "" if request.max_tokens is None else f"/{request.max_tokens}"
    return (
        harmless(request.key.tenant) or "-",
        request.state.value + ("" if request.has_listener else " …"),
        str(request.num_prompt_tokens),
        f"{request.num_output_tokens}{bound}",
        _age(request.age_s),
    )


def _row(name: str, cells: Sequence[str], style: str, at: int, item: object, controls: Controls, width: int) -> Line:
    """The cell at this place has the style, or all of it is marked as selected."""
    if item == controls.selected:
        return (Part("selected", cut(left(f">{name} {' '.join(cells)}", width), width)),)
    before = cut(f" {name} {''.join(f'{cell} ' for cell in cells[:at])}", width)
    coloured = cut(cells[at], width - width_of(before))
    rest = cut("".join(f" {cell}" for cell in cells[at + 1 :]), width - width_of(before) - width_of(coloured))
    return Part("", before), Part(style, coloured), Part("", rest)


def _around(
    items: Sequence[ItemT], selected: object, key_of: Callable[[ItemT], object], num_rows: int
) -> tuple[Sequence[ItemT], str]:
    """Return so many of the items, with the selected one among them, and which these are, where there are more."""
    if len(items) <= num_rows:
        return items, ""
    places = [place for place, item in enumerate(items) if key_of(item) == selected]
    first = max(0, min(len(items) - num_rows, (places[0] if places else 0) - num_rows // 2))
    return items[first : first + num_rows], f" {first + 1}-{first + num_rows} of {len(items)}"


def _note(controls: Controls, overview: Overview, width: int) -> list[Line]:
    sentences = list(controls.note) or ([] if controls.limits else _details(controls.selected, overview))
    if controls.limits is not None:
        values = [getattr(controls.limits, name) for name in LIMITS]
        sentences += [
            f"{number}: {name} = {value:,}" for number, (name, value) in enumerate(zip(LIMITS, values, strict=True), 1)
        ]
        sentences.append("A number changes that bound; escape leaves.")
    if controls.typing is not None:
        name, digits = controls.typing
        sentences.append(f"{name} = {digits}_  (enter sets it, escape leaves it)")
    style = "ask" if controls.question is not None or controls.typing is not None else ""
    lines = [line for sentence in sentences for line in wrap(harmless(sentence), width)]
    return [(Part(style, line),) for line in lines[:_MAX_NOTE_LINES]]


def _details(selected: object, overview: Overview) -> list[str]:
    """Return of what is selected what its row has no place for."""
    for executor in overview.executors:
        if executor.address == selected:
            trouble = f"; last trouble: {executor.last_error}" if executor.last_error else ""
            if executor.state is ExecutorState.LOST:
                trouble = f"; {_loss(executor)}"
            holder = f"; driven by {executor.holder}" if executor.holder else ""
            drafts = f"; {executor.draft_speedup:.2f} times as fast by drafts" if executor.draft_speedup else ""
            return [f"{executor.address}: {executor.model or 'no model yet'}{drafts}{holder}{trouble}"]
    for request in overview.requests:
        if request.key == selected:
            why = f"waits for: {request.waiting_for}" if request.waiting_for else f"on {request.executor or 'no row'}"
            return [f"{request.key.request_id} of {request.model}: {why}"]
    return []


def _drafts(executors: Sequence[Executor]) -> str:
    num_drafts = sum(executor.sums.num_drafts for executor in executors)
    num_right = sum(executor.sums.num_accepted_drafts for executor in executors)
    return f"  {_share(num_right, num_drafts)} of drafts right" if num_drafts else ""


def _counts(counts: Mapping[str, int]) -> str:
    found = [f"{name} {count:,}" for name, count in sorted(counts.items()) if count]
    return ", ".join(found) or "0"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 99.95 else f"{ms:.1f}" if ms >= 0.995 else f"{ms:.2f}"


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h"
