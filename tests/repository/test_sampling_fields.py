"""How many files a sampling field stands in."""

import re

import pytest

from repository_checks.sources import PROTOS, product_sources

MAX_FILES = 14


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_a_sampling_field_is_named_in_few_files_from_the_command_line_to_the_kernel(field):
    texts = {source.path.as_posix(): source.text for source in product_sources()}
    texts |= {path.relative_to(PROTOS).as_posix(): path.read_text() for path in PROTOS.rglob("*.proto")}
    names = {name for name, text in texts.items() if re.search(rf"\b{field}\b", text)}
    assert {"paceline/v1/sampling.proto", "kernels/paceline_kernels/sampling/triton/rules.py"} <= names
    assert len(names) <= MAX_FILES, sorted(names)
