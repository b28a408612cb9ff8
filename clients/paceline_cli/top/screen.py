"""What `top` shows, drawn by rich: a function of what is known, of what the keys chose, and of the size.

What clients and servers say is shown here, so nothing of it may move the cursor or hide what stands beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline_cli.top.state import TopState
from paceline_cli.top.values import ActiveRequest, Executor, ExecutorState, Overview, RequestKey, Sums
from paceline_client.results import RequestState

# Titles, and cells at least. What has less than 8 is a figure.
_EXECUTORS = {"EXECUTOR": 12, "STATE": 8, "ROWS": 5, "STEP": 5, "PRED": 5, "PLAN": 4, "STRV": 4, "TOK/S": 6}
_EXECUTORS |= {"USED": 4, "CACH": 4, "FREE": 4}
_REQUESTS = {"REQUEST": 12, "TENANT": 8, "STATE": 9, "PROMPT": 6, "OUTPUT": 7, "AGE": 4, "ON, WAITS FOR": 20}
KEYS = "q quit  e explain  c cancel  d drain  u undrain  l limits  s show  h help"
_MAX_NOTE_LINES = 8
_NUM_FIXED_LINES = 8  # the summary, and two headings with an empty line above each
_LEAST_WIDTH = 80  # in which all columns have a place
_OLD_S = 3.0  # an answer that is older is told to be
_SHARES = (0.5, 0.99)
_STYLES = {ExecutorState.READY: "green", ExecutorState.LOST: "bold red"}
Item = str | RequestKey
"""An executor by its address, or a request."""
ItemT = TypeVar("ItemT", Executor, ActiveRequest)
SHOWN = {"requests": (False, True), "waiting requests": (True,), "running requests": (False,)}
"""Which requests are shown, by whether they wait."""


@dataclass(slots=True)
class View:
    """What the keys chose. `note`: sentences for the lower end of the screen."""

    selected: Item | None = None
    shown: str = "requests"
    note: Sequence[str] = ()

    def requests(self, overview: Overview) -> list[ActiveRequest]:
        """Return those that are shown: what runs before what waits, this by its place in the queue."""
        chosen = [request for request in overview.requests if _is_waiting(request) in SHOWN[self.shown]]
        return sorted(chosen, key=lambda one: (_is_waiting(one), one.model, one.explanation.queue_position, -one.age_s))

    def items(self, overview: Overview) -> list[Executor | ActiveRequest]:
        """Return what can be selected, from top to bottom."""
        return [*overview.executors, *self.requests(overview)]


def live_screen(state: TopState, view: View, width: int, height: int, now_s: float) -> str:
    """Return `height` lines for a terminal, with what is selected among them and the note at their lower end."""
    executors, items = state.overview.executors, view.items(state.overview)
    sentences = view.note or [_details(one) for one in items if item_of(one) == view.selected]
    below = [*_lines(Group(*map(_text, sentences)), width)[:_MAX_NOTE_LINES], *_lines(Text(KEYS), width, is_cut=True)]
    num_left = max(0, height - len(below))
    num_free = max(0, num_left - _NUM_FIXED_LINES)
    num_executors = min(len(executors), max(1, num_free - min(len(items) - len(executors), num_free // 2)))
    tables = _tables(state, view, now_s, (num_executors, max(0, num_free - num_executors)))
    above = _lines(tables, width, is_cut=True)[:num_left]
    return "\n".join([*above, *[""] * (num_left - len(above)), *below][:height])


def whole_screen(state: TopState, width: int, now_s: float, *, is_terminal: bool) -> str:
    """Return everything, folded but cut nowhere, with what else is known of each executor: nobody can select it."""
    lines = _lines(_tables(state, View(), now_s, None), max(_LEAST_WIDTH, width), is_terminal=is_terminal)
    return "\n".join(lines)


def _is_waiting(request: ActiveRequest) -> bool:
    return request.explanation.state in (RequestState.WAITING, RequestState.PREEMPTED)


def item_of(one: Executor | ActiveRequest) -> Item:
    return one.address if isinstance(one, Executor) else one.key


def _lines(drawn: Group | Text, width: int, *, is_terminal: bool = True, is_cut: bool = False) -> list[str]:
    console = Console(force_terminal=is_terminal, width=width)
    with console.capture() as capture:
        console.print(drawn, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")
    return [line.rstrip() for line in capture.get().splitlines()]


def _text(text: str, style: str = "") -> Text:
    """Every character that a terminal would not simply show becomes a question mark."""
    return Text("".join(one if one.isprintable() and cell_len(one) else "?" for one in text), style)


def _tables(state: TopState, view: View, now_s: float, num_rows: tuple[int, int] | None) -> Group:
    """The summary, and so many executors and requests; None: all of them."""
    overview, requests = state.overview, view.requests(state.overview)
    num_executors, num_requests = num_rows or (None, None)
    parts: list[RenderableType] = [
        *_summary(state, now_s),
        Text(),
        _table(_EXECUTORS, overview.executors, lambda one: _executor_cells(one, state), view, num_executors),
        *([] if num_rows else [_text(f" {_details(executor)}") for executor in overview.executors]),
        Text(),
        _table(_REQUESTS, requests, _request_cells, view, num_requests, has_more=overview.has_more),
        *([] if requests else [Text(f" no {view.shown}")]),
    ]
    return Group(*parts)


def _summary(state: TopState, now_s: float) -> list[Text]:
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
    return [_title(state, now_s), *map(_text, lines)]


def _title(state: TopState, now_s: float) -> Text:
    age_s = now_s - state.updated_s
    if state.trouble:
        style, status = "bold red", f"lost, looking for the active server: {state.trouble}"
    elif state.overview.holder:
        style, status = "yellow", f"stands by: {state.overview.holder} drives the executors"
    elif age_s > _OLD_S:
        style, status = "yellow", f"as of {_age(age_s)} ago"
    else:
        style, status = "green", "live"
    return Text.assemble(_text(f"paceline top  {state.server}".rstrip() + "  ", "bold"), _text(status, style))


def _table(
    columns: Mapping[str, int],
    items: Sequence[ItemT],
    cells_of: Callable[[ItemT], Sequence[Text]],
    view: View,
    num_rows: int | None,
    *,
    has_more: bool = False,
) -> Table:
    """So many of the items, the selected one among them, in a line each; None: all of them, in lines as needed."""
    places = [place for place, item in enumerate(items) if item_of(item) == view.selected]
    where, first = "", 0
    if num_rows is not None and num_rows < len(items):
        first = max(0, min(len(items) - num_rows, (places[0] if places else 0) - num_rows // 2))
        where = f" {first + 1}-{first + num_rows}/{len(items)}{'+' if has_more else ''}"
        items = items[first : first + num_rows]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="reverse")
    for title, width in columns.items():
        name = Text(f" {title}{where}" if not table.columns else title, no_wrap=True, overflow="ellipsis")
        table.add_column(name, min_width=width, justify="right" if width < 8 else "left")
    for place, item in enumerate(items, first):
        name, *cells = cells_of(item)
        cells.insert(0, Text(">" if place in places else " ") + name)
        for cell in cells:
            cell.no_wrap, cell.overflow = (None, "fold") if num_rows is None else (True, "ellipsis")
        table.add_row(*cells, style="bold reverse" if place in places else None)
    return table


def _executor_cells(executor: Executor, told: TopState) -> list[Text]:
    work, blocks = told.work.get(executor.address, Sums()), executor.blocks
    figures = (
        f"{executor.num_rows}/{executor.max_num_rows}",
        *(
            _ms(spent_s / work.num_steps if work.num_steps else None)
            for spent_s in (work.busy_s, work.predicted_s, work.planning_s)
        ),
        f"{100 * work.starved_s / told.seconds:.0f}%",
        f"{work.num_output_tokens / told.seconds:,.0f}",
        *(_share(part, blocks.total) for part in (blocks.used, blocks.cached, blocks.free)),
    )
    state = Text(executor.state.value, _STYLES.get(executor.state, "yellow"))
    return [_text(executor.address), state, *map(Text, figures)]


def _request_cells(request: ActiveRequest) -> list[Text]:
    key, told, bound = request.key, request.explanation, "" if request.max_tokens is None else f"/{request.max_tokens}"
    return [
        _text(key.request_id + (f"/{key.index}" if key.index else "")),
        _text(key.tenant or "-"),
        Text(told.state + ("" if request.has_listener else " …"), "yellow" if _is_waiting(request) else "green"),
        Text(str(request.num_prompt_tokens)),
        Text(f"{told.num_output_tokens}{bound}"),
        Text(_age(request.age_s)),
        _text(told.waiting_for or told.executor),
    ]


def _details(one: Executor | ActiveRequest) -> str:
    """Return what its row has no place for."""
    if isinstance(one, ActiveRequest):
        told = one.explanation
        why = f"waits for: {told.waiting_for}" if told.waiting_for else f"on {told.executor or 'no row'}"
        return f"{one.key.request_id} of {one.model}: {why}"
    trouble = f"; last trouble: {one.last_error}" if one.last_error else ""
    if one.state is ExecutorState.LOST:
        since = "" if one.lost_for_s is None else f" for {_age(one.lost_for_s)}"
        trouble = f"; lost{since}: {one.last_error or 'it has not answered yet'}"
    holder = f"; driven by {one.holder}" if one.holder else ""
    drafts = f"; {one.draft_speedup:.2f} times as fast by drafts" if one.draft_speedup else ""
    ranks = f" on {one.num_ranks} ranks" if one.num_ranks > 1 else ""
    return f"{one.address}: {one.model or 'no model yet'}{ranks}{drafts}{holder}{trouble}"


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
    return f"{seconds / 60:.0f}m" if seconds < 6000 else f"{seconds / 3600:.0f}h"
