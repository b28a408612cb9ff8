"""OPERATING.md's recipes for quantised checkpoints, by the tools that they name, each in an environment of its own."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from paceline_executor.weights import load_checkpoint, load_tokenizer
from random_models import default_model_path

ROOT = Path(__file__).parents[2]
RECIPES = {  # what is imported, installed and comes out
    "llmcompressor": ("llmcompressor", "model-w4a16", "compressed-tensors-int4"),
    "gptqmodel": ("gptqmodel", "model-gptq", "gptq-int4"),
}
LESS = {"num_calibration_samples=256": "num_calibration_samples=8"}  # of a minute, not of half an hour
PROMPTS = [f"{topic}: tell in some sentences what {topic} is, and what for." * 4 for topic in ("a queue", "a tree")] * 4


def recipe(name):
    """The block of OPERATING.md that imports the tool."""
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "OPERATING.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if f"from {name} import" in block]
    return block


@pytest.mark.soak
@pytest.mark.parametrize("name", RECIPES)
def test_what_a_tool_makes_by_our_recipe_is_read_and_served(tmp_path, name):
    from real_model.oracle import Oracle

    package, output, quantization = RECIPES[name]
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "torch>=2.11,<2.14", package]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"{package} cannot be installed here")
    path = default_model_path(os.environ)
    (tmp_path / "model").mkdir()
    Oracle(path).save(tmp_path / "model", load_tokenizer(path))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    code = recipe(name).replace("org/model", str(tmp_path / "model"))
    for more, less in LESS.items():
        code = code.replace(more, less)
    two_cores = os.environ | {"GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path, env=two_cores)

    assert load_checkpoint(tmp_path / output).quantization == quantization
    command = [sys.executable, "-m", "paceline_cli", "demo", "--model", str(tmp_path / output)]
    assert "Paris" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
