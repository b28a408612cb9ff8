"""What `make audit` looks up, and what it says of what was found out. The look-up itself needs a network."""

import json
from importlib.metadata import version

import pytest

from repository_checks.audit import complaint, pins


def test_what_the_product_needs_is_pinned_to_what_is_installed():
    found = dict(line.split("==") for line in pins())
    assert {"grpcio", "torch", "tokenizers", "typer", "markupsafe"} <= found.keys()
    assert found["grpcio"] == version("grpcio")
    assert not {"paceline", "paceline-protos", "pytest", "atheris", "cryptography"} & found.keys()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], ""),
        ([{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}], "a 1: CVE-1"),
        (
            [{"name": "a", "skip_reason": "not found"}, {"name": "b", "version": "1", "vulns": []}],
            "1 of 2 were not looked",
        ),
    ],
    ids=["nothing is known", "something is", "not looked up"],
)
def test_only_what_was_looked_up_passes(tmp_path, found, said):
    path = tmp_path / "audit.json"
    path.write_text(json.dumps({"dependencies": found}))
    assert complaint(path).startswith(said)
    assert bool(complaint(path)) == bool(said)


def test_without_an_answer_nothing_passes(tmp_path):
    assert "nothing was looked up" in complaint(tmp_path / "audit.json")
    assert "sbom.cdx.json is written" in complaint(tmp_path / "audit.json")
