"""What the chart has rendered, kept for reviewers: `python -m chart_checks.goldens` writes it anew.

Apart from the tests, which only compare: a change of a template shows in them as what a cluster would be told.
"""

from pathlib import Path

import yaml

from chart_checks.helm import CHART, render
from repository_checks.sources import ROOT

FOLDER = ROOT / "tests" / "helm" / "goldens"
FILES = tuple(CHART / "ci" / f"{name}.yaml" for name in ("gpu-cert-manager", "one-scheduler"))
"""Between them the most that there is and the least."""


def golden_of(file: Path) -> Path:
    return FOLDER / file.name


if __name__ == "__main__":
    for file in FILES:
        golden_of(file).write_text(yaml.safe_dump_all(render(file), sort_keys=False, width=120), encoding="utf-8")
