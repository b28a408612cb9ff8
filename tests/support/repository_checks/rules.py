"""The rules that a look at one file's syntax tree decides. Each takes a source and yields its violations.

There is no list of exceptions, on purpose: a file that breaks a rule is changed, or the rule is, for everyone.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache
from itertools import chain

from repository_checks.sources import Source, Violation

Rule = Callable[[Source], Iterator[Violation]]

MAX_FUNCTION_LINES = 60
MAX_TRITON_KERNEL_LINES = 120
MAX_FILE_LINES = 600
MAX_METHODS = 25
MAX_FIELDS = 15
# What else runs code out of data, ruff bans: it finds what imports bind, and of these builtins only some calls.
UNSAFE_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
UNSAFE_OPTIONS = frozenset({"allow_pickle", "trust_remote_code"})
CLOCKS = frozenset(f"{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns"))
# Each has a rival that is in use: page is block, extend and retract are append and preempt, a stranger is an orphan,
# a hindrance a blocker. Words of the field that have none are free (sequence, job, entry, manager were not once, and
# stranger ones stood in for them).
UNUSED_WORDS = frozenset({"page", "extend", "retract", "bump", "onboard", "mixin", "hopeless", "stranger", "hindrance"})


def function_size(source: Source) -> Iterator[Violation]:
    """A function, its docstring included, fits a screen; a Triton kernel fits two."""
    for node in _functions(source):
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        is_long = num_lines > MAX_FUNCTION_LINES
        limit = MAX_TRITON_KERNEL_LINES if is_long and _is_triton_kernel(node) else MAX_FUNCTION_LINES
        if num_lines > limit:
            yield Violation(source.path, node.lineno, f"{node.name} has {num_lines} lines, the limit is {limit}")


def file_size(source: Source) -> Iterator[Violation]:
    """A file can be read in one sitting."""
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield Violation(source.path, MAX_FILE_LINES, f"the file has {num_lines} lines, the limit is {MAX_FILE_LINES}")


def class_width(source: Source) -> Iterator[Violation]:
    """A class fits in a head: at most 25 methods, and 15 fields if it changes.

    Methods are what the class itself defines, properties and private ones too. Fields are what an instance keeps: the
    annotated names of the class, and all that its methods assign to `self`. Frozen dataclasses and structs and named
    tuples are values, such as a configuration or a request as it was sent: they have as many fields as they have parts.
    Arrays of one length that a class makes at once are the columns of one table, hence one field.
    """
    for node in source.nodes(ast.ClassDef):
        num_methods, num_fields = len({method.name for method in _methods(node)}), _num_fields(node)
        if num_methods > MAX_METHODS:
            yield _too_wide(source, node, f"{num_methods} methods", MAX_METHODS)
        if num_fields > MAX_FIELDS and not _is_value(node):
            yield _too_wide(source, node, f"{num_fields} fields", MAX_FIELDS)


def environment(source: Source) -> Iterator[Violation]:
    """No option outside of `config.py` has an environment variable; ruff bans other reads."""
    for node in source.nodes(ast.keyword) if source.path.name != "config.py" else ():
        if node.arg == "envvar":
            yield Violation(source.path, node.value.lineno, "reads an environment variable outside of config.py")


def unsafe_loading(source: Source) -> Iterator[Violation]:
    """Nothing runs code out of data: no builtin that does, and no library that is told that it may."""
    for name in source.nodes(ast.Name):
        if name.id in UNSAFE_BUILTINS and isinstance(name.ctx, ast.Load):
            yield Violation(source.path, name.lineno, f"{name.id} runs code out of data")
    for option in source.nodes(ast.keyword):
        if option.arg in UNSAFE_OPTIONS and (value := ast.unparse(option.value)) != "False":
            yield Violation(source.path, option.value.lineno, f"{option.arg}={value} runs code out of data")


def words(source: Source) -> Iterator[Violation]:
    """One meaning, one word: names do not use the words the architecture has set aside."""
    for line, name in _defined_names(source):
        for word in sorted(UNUSED_WORDS & _split_words(name)):
            yield Violation(source.path, line, f"{name} uses the word '{word}'")


def keyword_pass_through(source: Source) -> Iterator[Violation]:
    """No `**kwargs`: a signature says what it takes. Decorators keep theirs by a ParamSpec."""
    for node in source.nodes(ast.arguments):
        match node:
            case ast.arguments(kwarg=ast.arg(arg=name, annotation=annotation) as kwargs) if not (
                isinstance(annotation, ast.Attribute) and annotation.attr == "kwargs"
            ):
                yield Violation(source.path, kwargs.lineno, f"takes **{name}")


def asserted_times(source: Source) -> Iterator[Violation]:
    """A test asserts no times: no clock in an assertion, nor a name that got its value from one."""
    clocks = _clocks(source)
    for function in _functions(source) if clocks else ():
        timed = _timed_names(function, clocks)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and (_reads_a_clock(node, clocks) or timed & _loaded_names(node)):
                yield Violation(source.path, node.lineno, f"{function.name} asserts a time")


def search_sizes(source: Source) -> Iterator[Violation]:
    """How far Hypothesis searches is a share of the profile's `max_examples`, so that `make soak` searches further."""
    if source.path.name == "conftest.py":
        return
    for node in source.nodes(ast.keyword):
        match node:
            case ast.keyword(arg="max_examples", value=ast.Constant(value=value)):
                yield Violation(source.path, node.value.lineno, f"max_examples={value!r} is the same in every profile")


# What gives a name to something.
NAMING: tuple[type[ast.AST], ...] = (
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name, ast.Attribute, ast.ExceptHandler),
    *(ast.MatchAs, ast.MatchStar, ast.MatchMapping, ast.Import, ast.ImportFrom),
)
EVERYWHERE: tuple[Rule, ...] = (function_size, file_size, class_width)
IN_THE_PRODUCT: tuple[Rule, ...] = (environment, unsafe_loading, words, keyword_pass_through)
IN_THE_TESTS: tuple[Rule, ...] = (asserted_times, search_sizes)


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from source.nodes(ast.FunctionDef)
    yield from source.nodes(ast.AsyncFunctionDef)


def _too_wide(source: Source, node: ast.ClassDef, found: str, limit: int) -> Violation:
    return Violation(source.path, node.lineno, f"{node.name} has {found}, the limit is {limit}")


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))


def _num_fields(node: ast.ClassDef) -> int:
    declared = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and "ClassVar" not in ast.unparse(part.annotation)
    }
    assigned = {name for method in _methods(node) for name in _assigned_to_self(method)}
    tables = [columns for method in _methods(node) for columns in _tables(method)]
    return len((declared | assigned).difference(*tables)) + len(tables)


def _assigned_to_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _tables(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterable[set[str]]:
    """The fields that a method fills with new arrays: those of one length are the columns of a table."""
    tables: dict[str, set[str]] = {}
    for node in method.body:
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="zeros" | "full"), args=[shape, *_]),
            ):
                length = shape.elts[0] if isinstance(shape, ast.Tuple) and shape.elts else shape
                tables.setdefault(ast.unparse(length), set()).add(name)
    return tables.values()


def _is_value(node: ast.ClassDef) -> bool:
    is_frozen = any(
        isinstance(decorator, ast.Call)
        and any(keyword.arg == "frozen" and ast.unparse(keyword.value) == "True" for keyword in decorator.keywords)
        for decorator in node.decorator_list
    )
    is_frozen = is_frozen or any(each.arg == "frozen" and ast.unparse(each.value) == "True" for each in node.keywords)
    return is_frozen or any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)


def _is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    targets = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
    return any(ast.unparse(target) == "triton.jit" for target in targets)


def _clocks(source: Source) -> Set[str]:
    """The expressions by which a file reads a clock, as its imports of `time` name them."""
    clocks: set[str] = set()
    for imported in source.nodes(ast.Import):
        modules = [alias.asname or alias.name for alias in imported.names if alias.name == "time"]
        clocks |= {f"{module}.{clock}" for module in modules for clock in CLOCKS}
    for taken in source.nodes(ast.ImportFrom):
        if taken.module == "time":
            clocks |= {alias.asname or alias.name for alias in taken.names if alias.name in CLOCKS}
    return clocks


def _reads_a_clock(root: ast.AST, clocks: Set[str]) -> bool:
    for node in ast.walk(root):
        match node:
            case ast.Name(id=name) if name in clocks:
                return True
            case ast.Attribute(value=ast.Name(id=module), attr=name) if f"{module}.{name}" in clocks:
                return True
    return False


def _timed_names(function: ast.AST, clocks: Set[str]) -> set[str]:
    """Names whose value was computed from a clock, at once or by way of other such names."""
    timed: set[str] = set()
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ) if _reads_a_clock(value, clocks) or timed & _loaded_names(value):
                timed.add(name)
    return timed


def _loaded_names(root: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(root) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _defined_names(source: Source) -> Iterator[tuple[int, str]]:
    """Every name that a file gives to something, wherever it does so."""
    for node in chain.from_iterable(map(source.nodes, NAMING)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.asname) for alias in names if alias.asname)


@cache
def _split_words(name: str) -> Set[str]:
    """Its words, also in the singular."""
    parts = chain.from_iterable(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", part) for part in name.split("_"))
    found = {part.lower() for part in parts}
    return found | {word.removesuffix("s") for word in found} | {re.sub("ies$", "y", word) for word in found}
