"""The rules that one file's syntax tree decides: the tree keeps them, and each of them can be broken."""

from pathlib import Path

import pytest

from repository_checks import rules
from repository_checks.sources import all_sources, parse, product_sources

pytestmark = pytest.mark.lint

CORE = "scheduler/paceline_scheduler/core/planner.py"
LINES_61 = "def plan():\n" + "    x = 1\n" * 60
KERNEL_121 = "import triton\n@triton.jit\ndef kernel():\n" + "    x = 1\n" * 120


def violations(rule, path, text):
    """What a rule says about a made-up file."""
    return [str(violation) for violation in rule(parse(Path(path), text))]


@pytest.mark.parametrize("rule", rules.EVERYWHERE, ids=lambda rule: rule.__name__)
def test_product_tests_and_tools_keep_the_rule(rule):
    """Sizes hold for everything written by hand."""
    assert [str(violation) for source in all_sources() for violation in rule(source)] == []


@pytest.mark.parametrize("rule", rules.IN_THE_PRODUCT, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule):
    """The packages that are installed keep the rest; tests may look inside and do what they like."""
    assert [str(violation) for source in product_sources() for violation in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "path", "text", "message"),
    [
        (rules.function_size, CORE, LINES_61, "1: plan has 61 lines, the limit is 60"),
        (rules.function_size, CORE, f"async {LINES_61}", "1: plan has 61 lines, the limit is 60"),
        (rules.function_size, "kernels/paceline_kernels/a.py", KERNEL_121, "3: kernel has 121 lines, the limit is 120"),
        (rules.file_size, CORE, "x = 1\n" * 401, "400: the file has 401 lines, the limit is 400"),
        (rules.file_size, "kernels/paceline_kernels/a.py", "x = 1\n" * 501, "500: the file has 501 lines"),
        (rules.environment, CORE, "import os\nos.environ['A']", "2: os.environ outside of config.py"),
        (rules.environment, CORE, "import os\nos.getenv('A')", "2: os.getenv outside of config.py"),
        (rules.environment, CORE, "from os import environ", "1: imports the environment"),
        (rules.environment, CORE, "option(envvar='A')", "1: reads an environment variable"),
        (rules.unsafe_loading, CORE, "import pickle", "1: imports pickle"),
        (rules.unsafe_loading, CORE, "from pickle import loads", "1: imports pickle"),
        (rules.unsafe_loading, CORE, "torch.load('x')", "1: torch.load"),
        (rules.unsafe_loading, CORE, "eval('1')", "1: calls eval()"),
        (rules.unsafe_loading, CORE, "exec('1')", "1: calls exec()"),
        (rules.unsafe_loading, CORE, "np.load(p, allow_pickle=True)", "1: allow_pickle=True"),
        (rules.generated_modules, CORE, "from paceline.v1 import plan_pb2", "1: imports paceline.v1"),
        (rules.generated_modules, CORE, "import paceline.v1.plan_pb2", "1: imports paceline.v1.plan_pb2"),
        (rules.generated_modules, "scheduler/paceline_scheduler/errors.py", "import paceline.v1", "1: imports"),
        (rules.words, CORE, "class BlockManager: ...", "1: BlockManager uses the word 'manager'"),
        (rules.words, CORE, "def f(num_sequences): ...", "1: num_sequences uses the word 'sequence'"),
        (rules.words, CORE, "class A:\n    page_size: int", "2: page_size uses the word 'page'"),
        (rules.words, CORE, "entries: list[int] = []", "1: entries uses the word 'entry'"),
        (rules.keyword_pass_through, CORE, "def f(**kwargs): ...", "1: f takes **kwargs"),
    ],
)
def test_the_rule_bites(rule, path, text, message):
    """A made-up file that breaks the rule is reported with its place."""
    (violation,) = violations(rule, path, text)
    assert violation.startswith(f"{path}:{message}")


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.function_size, CORE, "def plan():\n" + "    x = 1\n" * 59),
        (rules.function_size, "kernels/paceline_kernels/a.py", KERNEL_121.replace("    x = 1\n", "", 1)),
        (rules.file_size, CORE, "x = 1\n" * 400),
        (rules.file_size, "kernels/paceline_kernels/a.py", "x = 1\n" * 500),
        (rules.environment, "scheduler/paceline_scheduler/config.py", "import os\nos.environ['A']"),
        (rules.unsafe_loading, CORE, "model.eval()\nself.load('x')\nre.compile('x')"),
        (rules.generated_modules, "scheduler/paceline_scheduler/link/wire.py", "from paceline.v1 import plan_pb2"),
        (rules.generated_modules, "scheduler/paceline_scheduler/api/servicer.py", "from paceline.v1 import plan_pb2"),
        (rules.generated_modules, "clients/paceline_client/errors.py", "from paceline.v1 import plan_pb2"),
        (rules.words, CORE, "values.extend([1])\nmanagerial: int = 1"),
        (rules.keyword_pass_through, CORE, "def f(*args: P.args, **kwargs: P.kwargs): ..."),
    ],
)
def test_the_rule_lets_the_rest_through(rule, path, text):
    """Just inside the limit, or in the place made for it, nothing is reported."""
    assert violations(rule, path, text) == []
