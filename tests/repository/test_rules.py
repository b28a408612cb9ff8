"""The rules that one file's syntax tree decides: the tree keeps them, and each of them can be broken."""

from pathlib import Path

import pytest

from repository_checks import rules
from repository_checks.sources import Source, product_sources, sources_of_tests

pytestmark = pytest.mark.lint

CORE = "scheduler/paceline_scheduler/core/planner.py"
TEST = "tests/scheduler/core/test_planner.py"
TIMED = "import time\ndef test_it(start):\n    took = time.monotonic() - start\n    assert {condition}"
TIMED_BY_NAME = "from time import monotonic_ns as now\ndef test_it(end):\n    assert now() < end"
LINES_61 = "def plan():\n" + "    x = 1\n" * 60
METHODS_25 = "class Queue:\n" + "".join(f"    def do_{i}(self): ...\n" for i in range(25))
PARTS_16 = "".join(f"    part_{i}: int\n" for i in range(16))
ASSIGNED_15 = "class Queue:\n    def __init__(self):\n" + "".join(f"        self.a_{i} = 0\n" for i in range(15))
KERNEL_121 = "import triton\n@triton.jit\ndef kernel():\n" + "    x = 1\n" * 120


def class_with_16_arrays(length):
    """A class that makes 16 arrays, each `length` long, in which {i} is its number."""
    assignments = [f"        self.a_{i} = np.zeros({length.format(i=i)}, dtype=np.int32)\n" for i in range(16)]
    return "class Rows:\n    def __init__(self):\n" + "".join(assignments)


PRODUCT_RULES = (*rules.EVERYWHERE, *rules.IN_THE_PRODUCT)
TEST_RULES = (*rules.EVERYWHERE, *rules.IN_THE_TESTS)


def of_all(rules_of_it, source):
    return [violation for rule in rules_of_it for violation in rule(source)]


def violations(rule, path, text):
    return [str(violation) for violation in rule(Source(Path(path), text))]


def test_what_is_written_by_hand_keeps_the_rules():
    product = [str(violation) for source in product_sources() for violation in of_all(PRODUCT_RULES, source)]
    tests = [str(violation) for source in sources_of_tests() for violation in of_all(TEST_RULES, source)]
    assert product + tests == []


@pytest.mark.parametrize(
    ("rule", "path", "text", "message"),
    [
        (rules.function_size, CORE, LINES_61, "1: plan has 61 lines, the limit is 60"),
        (rules.function_size, CORE, f"async {LINES_61}", "1: plan has 61 lines, the limit is 60"),
        (rules.function_size, "kernels/paceline_kernels/a.py", KERNEL_121, "3: kernel has 121 lines, the limit is 120"),
        (rules.file_size, CORE, "x = 1\n" * 601, "600: the file has 601 lines, the limit is 600"),
        (rules.file_size, "kernels/paceline_kernels/a.py", "x = 1\n" * 601, "600: the file has 601 lines"),
        (
            rules.class_width,
            CORE,
            METHODS_25 + "    async def one_more(self): ...",
            "1: Queue has 26 methods, the limit",
        ),
        (
            rules.class_width,
            TEST,
            METHODS_25 + "    async def one_more(self): ...",
            "1: Queue has 26 methods, the limit",
        ),
        (rules.class_width, CORE, f"class Queue:\n{PARTS_16}", "1: Queue has 16 fields, the limit is 15"),
        (rules.class_width, CORE, f"@dataclass(slots=True)\nclass Queue:\n{PARTS_16}", "2: Queue has 16 fields"),
        (rules.class_width, CORE, f"{ASSIGNED_15}    def f(self):\n        self.b += 1", "1: Queue has 16 fields"),
        (rules.class_width, CORE, f"{ASSIGNED_15}    def f(self):\n        a, self.b = 1, 2", "1: Queue has 16 fields"),
        (rules.class_width, CORE, class_with_16_arrays("size_{i}"), "1: Rows has 16 fields, the limit is 15"),
        (rules.environment, CORE, "option(envvar='A')", "1: reads an environment variable"),
        (rules.unsafe_loading, CORE, "eval('1')", "1: eval runs code"),
        (rules.unsafe_loading, CORE, "run = exec", "1: exec runs code"),
        (rules.unsafe_loading, CORE, "compile(text)", "1: compile runs code"),
        (rules.unsafe_loading, CORE, "__import__(name)", "1: __import__ runs code"),
        (rules.unsafe_loading, CORE, "np.load(p, allow_pickle=True)", "1: allow_pickle=True"),
        (rules.unsafe_loading, CORE, "np.load(p, allow_pickle=flag)", "1: allow_pickle=flag"),
        (rules.words, CORE, "class TableMixin: ...", "1: TableMixin uses the word 'mixin'"),
        (rules.words, CORE, "def f(num_bumps): ...", "1: num_bumps uses the word 'bump'"),
        (rules.words, CORE, "is_stranger: bool = False", "1: is_stranger uses the word 'stranger'"),
        (rules.words, CORE, "def refuse_hopeless(): ...", "1: refuse_hopeless uses the word 'hopeless'"),
        (rules.words, CORE, "class A:\n    page_size: int", "2: page_size uses the word 'page'"),
        (rules.words, CORE, "onboarded: list[int] = []\nonboards = 1", "2: onboards uses the word 'onboard'"),
        (rules.words, CORE, "pages = []", "1: pages uses the word 'page'"),
        (rules.words, CORE, "for page in blocks: ...", "1: page uses the word 'page'"),
        (rules.words, CORE, "[page for page in blocks]", "1: page uses the word 'page'"),
        (rules.words, CORE, "if page := f(): ...", "1: page uses the word 'page'"),
        (rules.words, CORE, "def f(self):\n    self.page = 1", "2: page uses the word 'page'"),
        (rules.words, CORE, "with f() as page: ...", "1: page uses the word 'page'"),
        (rules.words, CORE, "try: ...\nexcept OSError as page: ...", "2: page uses the word 'page'"),
        (rules.words, CORE, "match x:\n    case [page]: ...", "2: page uses the word 'page'"),
        (rules.words, CORE, "import blocks as pages", "1: pages uses the word 'page'"),
        (rules.keyword_pass_through, CORE, "def f(**kwargs): ...", "1: takes **kwargs"),
        (rules.keyword_pass_through, CORE, "def f(**kwargs: typing.Any): ...", "1: takes **kwargs"),
        (rules.keyword_pass_through, CORE, "f = lambda **kwargs: g(**kwargs)", "1: takes **kwargs"),
        (
            rules.asserted_times,
            TEST,
            TIMED.format(condition="time.monotonic() - start < 5"),
            "4: test_it asserts a time",
        ),
        (rules.asserted_times, TEST, TIMED.format(condition="took < 5"), "4: test_it asserts a time"),
        (rules.asserted_times, TEST, TIMED_BY_NAME, "3: test_it asserts a time"),
        (rules.search_sizes, TEST, "settings(max_examples=40)", "1: max_examples=40 is the same in every profile"),
    ],
)
def test_the_rule_bites(rule, path, text, message):
    (violation,) = violations(rule, path, text)
    assert violation.startswith(f"{path}:{message}")


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.function_size, CORE, "def plan():\n" + "    x = 1\n" * 59),
        (rules.function_size, "kernels/paceline_kernels/a.py", KERNEL_121.replace("    x = 1\n", "", 1)),
        (rules.file_size, CORE, "x = 1\n" * 600),
        (rules.class_width, CORE, METHODS_25),
        (rules.class_width, CORE, METHODS_25 + "    @f.setter\n    def do_1(self, value): ..."),
        (rules.class_width, CORE, ASSIGNED_15),
        (rules.class_width, CORE, f"{ASSIGNED_15}    def f(self):\n        self.a_0 = self.b.c = self.d[0] = 1"),
        (rules.class_width, CORE, f"@dataclass(frozen=True, slots=True)\nclass Request:\n{PARTS_16}"),
        (rules.class_width, CORE, f"class Request(NamedTuple):\n{PARTS_16}"),
        (rules.class_width, CORE, f"class Request(Struct, frozen=True):\n{PARTS_16}"),
        (rules.class_width, CORE, class_with_16_arrays("num_rows")),
        (rules.environment, "scheduler/paceline_scheduler/config.py", "option(envvar='A')"),
        (rules.unsafe_loading, CORE, "model.eval()\nself.load('x')\nre.compile('x')"),
        (rules.unsafe_loading, CORE, "np.load(p, allow_pickle=False)"),
        (rules.words, CORE, "values.extend([1])\npaged: int = 1\nprint(message.page)\nentry, job = 1, 2"),
        (rules.keyword_pass_through, CORE, "def f(*args: P.args, **kwargs: P.kwargs): ..."),
        (rules.asserted_times, TEST, TIMED.format(condition="start")),
        (rules.search_sizes, TEST, "settings(max_examples=settings.default.max_examples // 2)"),
    ],
)
def test_the_rule_lets_the_rest_through(rule, path, text):
    assert violations(rule, path, text) == []
