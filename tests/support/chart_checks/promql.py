"""Holds PromQL against the metrics that the two programs show: names, labels, and whose they are.

Knows what Prometheus calls the parts of a histogram, and the labels of a scrape. Refuses to know alerts and dashboards.
"""

from collections.abc import Iterator

import promql_parser

from paceline.process.metrics import Definition, Kind
from paceline.process.metrics_port import PREFIX
from paceline_executor.link import metrics as executor
from paceline_scheduler.observers import definitions as scheduler

LABELS_OF_A_SCRAPE = frozenset({"namespace", "job", "instance", "pod"})
_STARTED = Definition("process_start_time_seconds", Kind.GAUGE, "Shown by prometheus-client; asked of executors.")
_OF_EXECUTORS = frozenset({*executor.READ, *executor.COUNTED, _STARTED})
_DEFINITIONS = {_STARTED.name: _STARTED} | {
    PREFIX + each.name: each for each in (*scheduler.READ, *scheduler.COUNTED, *executor.READ, *executor.COUNTED)
}


def selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    """What is read of Prometheus, in the order written."""
    return [part for part in _parts(expression) if isinstance(part, promql_parser.VectorSelector)]


def problems_of(text: str) -> list[str]:
    """What Prometheus would answer with an error, or with nothing for ever."""
    try:
        expression = promql_parser.parse(text)
    except ValueError as error:
        return [str(error)]
    return [
        *(problem for selector in selectors(expression) for problem in _problems_of_selector(selector)),
        *(problem for part in _parts(expression) for problem in _problems_of_grouping(part)),
    ]


def definition_of(name: str) -> Definition | None:
    """The metric that a series of this name is a part of."""
    definition = _DEFINITIONS.get(name)
    if definition is not None:
        return None if definition.kind is Kind.HISTOGRAM else definition
    histogram = _DEFINITIONS.get(name.rpartition("_")[0])
    is_part = histogram is not None and histogram.kind is Kind.HISTOGRAM
    return histogram if is_part and name.endswith(("_bucket", "_sum", "_count")) else None


def _parts(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    parts: list[promql_parser.Expr] = []
    promql_parser.walk(expression, parts.append)
    return parts


def _labels_of(selector: promql_parser.VectorSelector) -> frozenset[str]:
    definition = definition_of(selector.name or "")
    own = frozenset(definition.labels) if definition else frozenset[str]()
    le = {"le"} if (selector.name or "").endswith("_bucket") else set[str]()
    return LABELS_OF_A_SCRAPE | own | le


def _problems_of_selector(selector: promql_parser.VectorSelector) -> Iterator[str]:
    definition = definition_of(selector.name or "")
    if definition is None:
        yield f"no program shows {selector.name}"
        return
    known = _labels_of(selector)
    for matcher in selector.matchers.matchers:
        if matcher.name not in known:
            yield f"{selector.name} has no label {matcher.name}"
    jobs = {matcher.value for matcher in selector.matchers.matchers if matcher.name == "job"}
    if len(jobs) != 1:
        yield f"{selector.name} is of every release: name its job"
    elif jobs.pop().endswith("-executors") is not (definition in _OF_EXECUTORS):
        yield f"{selector.name} is asked of the wrong program"


def _problems_of_grouping(part: promql_parser.Expr) -> Iterator[str]:
    match part:
        case promql_parser.AggregateExpr(modifier=modifier) if modifier is not None:
            named = modifier.labels
        case promql_parser.BinaryExpr(modifier=modifier) if modifier is not None:
            named = [*(modifier.matching.labels if modifier.matching else ()), *(modifier.group_labels or ())]
        case _:
            return
    known = frozenset[str]().union(*(_labels_of(selector) for selector in selectors(part)))
    for label in named:
        if label not in known:
            yield f"nothing in it has the label {label}: {part}"
