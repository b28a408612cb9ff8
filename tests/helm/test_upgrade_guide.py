"""What the chart's README says about versions is what the programs do."""

import re

import pytest

from chart_checks.helm import CHART
from paceline.plan.values import PROTOCOLS, ProtocolRange

README = (CHART / "README.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line.startswith("|")]
HEADER = next(number for number, row in enumerate(ROWS) if row[0].startswith("scheduler \\ executor"))


def protocols(text):
    """Of `1 to 2` or `3`."""
    lowest, _, highest = text.partition(" to ")
    return ProtocolRange(int(lowest), int(highest or lowest))


@pytest.mark.parametrize("row", ROWS[HEADER + 2 : HEADER + 5], ids=lambda row: row[0])
def test_the_matrix_of_versions_is_what_both_sides_agree_on(row):
    scheduler, *agreed = row
    for executor, version in zip(ROWS[HEADER][1:], agreed, strict=True):
        found = protocols(scheduler).highest_in_common(protocols(executor))
        assert (str(found) if found else "–") == version


def test_the_range_of_this_release_is_named():
    assert re.search(r"This release speaks (\d to \d)", README)[1] == str(PROTOCOLS)


def test_every_values_file_is_named():
    assert sorted(re.findall(r"\(ci/([a-z0-9-]+\.yaml)\)", README)) == sorted(
        path.name for path in (CHART / "ci").glob("*.yaml")
    )
