"""The quality row: perplexity of the fast path and of float32 on the same GGUF file, from what measures both.

`paceline validate` prints one JSON object on its last line. Apart from `measurements`,
which engines answer in turns: this one is taken once.
"""

import json
import os
import sys
from collections.abc import Sequence
from subprocess import PIPE

from paceline_executor.weights import DEFAULT_MODEL
from process_groups import run_program
from side_by_side.engines import OURS, SEARCH_PATH
from side_by_side.errors import EngineError
from side_by_side.measurements import Values
from side_by_side.results import Sample

QUALITY = "quality"
COMMAND = ("-m", "paceline_cli", "validate", DEFAULT_MODEL, "--against", DEFAULT_MODEL, "--json")
_MEASURED = (0, 1, 10)  # whatever its verdict is
SHORT_COMMAND = (*COMMAND, "--tokens", "2048")


def measure_quality(command: Sequence[str]) -> Values:
    """Run the command, arguments of our own interpreter. `EngineError` when it fails or prints something else."""
    environment = {**os.environ, "PYTHONPATH": str(SEARCH_PATH)}
    finished = run_program([sys.executable, *command], environment, stdout=PIPE, stderr=PIPE)
    if finished.code not in _MEASURED:
        raise EngineError(f"perplexity: code {finished.code}: {finished.stderr.strip()[-200:]}")
    try:
        numbers = json.loads(finished.stdout.strip().rpartition("\n")[2])["texts"]["prose"]
        return {"fast": float(numbers["perplexity"]), "float32": float(numbers["base_perplexity"])}
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"perplexity: the last line is not the JSON object expected: {error!r}") from error


def quality_sample(values: Values) -> Sample:
    """The numbers as part of a run; what else the machine did has no part in them."""
    return Sample(QUALITY, OURS, 0, values, busy_share=0.0, others_share=0.0, waited_s=0.0, load_average=0.0)
