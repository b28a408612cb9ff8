"""Results as lines of text, of a width that fits a terminal and a log. Knows results and targets."""

from collections.abc import Iterator, Sequence

from gpu_kernels.results import Failure, Result
from gpu_kernels.targets import TARGETS, Target

HEADER = (
    f"{'operation and shape':<44} {'us':>8} {'rate':>12} {'limit':>5} {'torch':>6} {'anchor':>6}  target\n"
    f"{'':44} {'':8} {'':12} {'':5} {'x':>6} {'x':>6}"
)


def line(result: Result | Failure) -> str:
    """One result: time, rate, its share of the device's limit, how many times as long torch and the best anchor take,
    whether each target is reached, and what was predicted.
    """
    if isinstance(result, Failure):
        return f"{result.case.name:<44} FAILED: {result.sentence}"
    rate = f"{result.rate:.3g} {result.case.bound.unit}"
    share = "" if result.share_of_ceiling is None else f"{result.share_of_ceiling:.0%}"
    figures = f"{result.us:>8.2f} {rate:>12} {share:>5} {_times(result.torch_ratio)} {_times(result.anchor_ratio)}"
    note = f" (torch: {result.torch_failure})" if result.torch_failure else ""
    predicted = f"  predicted: {result.case.predicted}" if result.case.predicted else ""
    return f"{result.case.name:<44} {figures}  {_verdicts(result)}{note}{predicted}".rstrip()


def summary(results: Sequence[Result | Failure], targets: Sequence[Target] = TARGETS) -> Iterator[str]:
    """A line per target: at how many shapes it is reached, and where it is missed the most."""
    for target in targets:
        measured = [result for result in results if isinstance(result, Result) and target.applies(result)]
        known = [result for result in measured if target.is_reached(result) is not None]
        reached = [result for result in known if target.is_reached(result)]
        worst = min(known, key=target.margin, default=None)
        found = f"reached at {len(reached)} of {len(known)} shapes" if known else "not measured"
        sentence = f"{target}: {found}"
        if worst is not None and not target.is_reached(worst):
            sentence += f", least at {worst.case.shape_name} ({target.figure(worst):.3g})"
        if len(known) < len(measured):
            sentence += f"; {len(measured) - len(known)} have no anchor"
        yield sentence


def _times(ratio: float | None) -> str:
    return " " * 6 if ratio is None else f"{ratio:>6.2f}"


def _verdicts(result: Result) -> str:
    verdicts = []
    for target in TARGETS:
        is_reached = target.is_reached(result) if target.applies(result) else None
        if is_reached is not None:
            verdicts.append(f"{target.bound}: {'reached' if is_reached else 'missed'}")
    return ", ".join(verdicts)
