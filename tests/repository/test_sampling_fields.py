"""How many files a sampling field stands in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("clients", "executor", "kernels", "protos", "scheduler")
MAX_FILES = 14


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in {".py", ".proto"} and "_pb2" not in path.name:
                yield path


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_a_sampling_field_is_named_in_few_files_from_the_command_line_to_the_kernel(field):
    naming = [path for path in sources() if re.search(rf"\b{field}\b", path.read_text())]
    names = {path.relative_to(ROOT).as_posix() for path in naming}
    assert {"protos/paceline/v1/sampling.proto", "kernels/paceline_kernels/sampling/triton/rules.py"} <= names
    assert len(names) <= MAX_FILES, sorted(names)
