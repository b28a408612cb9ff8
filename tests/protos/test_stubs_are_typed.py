"""What a caller's type checker makes of the generated stubs, where they are installed and not checked out."""

import re
import shutil
import venv

from repository_checks.programs import run
from repository_checks.sources import PROTOS

CALLER = """
from paceline.v1.inference_pb2 import GenerateRequest
reveal_type(GenerateRequest().request_id)
"""


def test_a_callers_mypy_knows_the_fields(tmp_path):
    """Without `py.typed` beside them everything would be Any."""
    venv.create(tmp_path / "environment", with_pip=False)
    (installed,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    shutil.copytree(PROTOS / "paceline" / "v1", installed / "paceline" / "v1")
    (tmp_path / "caller.py").write_text(CALLER)
    python = tmp_path / "environment" / "bin" / "python"

    said = run("mypy", "--python-executable", python, "--ignore-missing-imports", "caller.py", cwd=tmp_path).stdout

    assert re.search(r'Revealed type is "(builtins\.)?str"', said)
    assert "py.typed" not in said
