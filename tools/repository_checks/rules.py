"""The rules that a look at one file's syntax tree decides. Each takes a source and yields its violations.

There is no list of exceptions, on purpose: a file that breaks a rule is changed, or the rule is, for everyone.
"""

import ast
import re
from collections.abc import Callable, Iterator
from itertools import chain

from repository_checks.sources import Source, Violation

Rule = Callable[[Source], Iterator[Violation]]

MAX_FUNCTION_LINES = 60
MAX_TRITON_KERNEL_LINES = 120
MAX_FILE_LINES = 400
MAX_KERNELS_FILE_LINES = 500

UNSAFE_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
UNSAFE_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
UNUSED_WORDS = frozenset(
    {"sequence", "page", "job", "entry", "extend", "retract", "bump", "onboard", "manager", "mixin"}
)


def function_size(source: Source) -> Iterator[Violation]:
    """A function, its docstring included, fits a screen; a Triton kernel fits two."""
    for node in _functions(source):
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = MAX_TRITON_KERNEL_LINES if _is_triton_kernel(node) else MAX_FUNCTION_LINES
        if num_lines > limit:
            yield Violation(source.path, node.lineno, f"{node.name} has {num_lines} lines, the limit is {limit}")


def file_size(source: Source) -> Iterator[Violation]:
    """A file can be read in one sitting; kernels may take a little longer."""
    num_lines = len(source.text.splitlines())
    limit = MAX_KERNELS_FILE_LINES if source.package == "paceline_kernels" else MAX_FILE_LINES
    if num_lines > limit:
        yield Violation(source.path, limit, f"the file has {num_lines} lines, the limit is {limit}")


def environment(source: Source) -> Iterator[Violation]:
    """The environment is read in `config.py` and nowhere else."""
    if source.path.name == "config.py":
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT_NAMES:
                yield Violation(source.path, node.lineno, f"os.{name} outside of config.py")
            case ast.ImportFrom(module="os", names=names) if ENVIRONMENT_NAMES & {alias.name for alias in names}:
                yield Violation(source.path, node.lineno, "imports the environment outside of config.py")
            case ast.keyword(arg="envvar"):
                yield Violation(source.path, node.value.lineno, "reads an environment variable outside of config.py")


def unsafe_loading(source: Source) -> Iterator[Violation]:
    """Nothing that runs code out of data: no pickle, torch.load, eval, exec."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                for module in _imported_modules(node):
                    if module.partition(".")[0] in UNSAFE_MODULES:
                        yield Violation(source.path, node.lineno, f"imports {module}")
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield Violation(source.path, node.lineno, "torch.load runs code out of the file")
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_BUILTINS:
                yield Violation(source.path, node.lineno, f"calls {name}()")
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                yield Violation(source.path, node.value.lineno, f"{node.arg}=True runs code out of data")


def generated_modules(source: Source) -> Iterator[Violation]:
    """`paceline.v1` stays at the border: modules named wire or servicer, `__main__`, the client's errors, testing."""
    if _is_at_the_border(source):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _imported_modules(node):
                if module == "paceline" or module.startswith("paceline."):
                    yield Violation(source.path, node.lineno, f"imports {module} outside of a wire or servicer module")


def words(source: Source) -> Iterator[Violation]:
    """One meaning, one word: names do not use the words the architecture has set aside."""
    for line, name in _defined_names(source):
        for word in sorted(UNUSED_WORDS & set(_split_words(name))):
            yield Violation(source.path, line, f"{name} uses the word '{word}'")


def keyword_pass_through(source: Source) -> Iterator[Violation]:
    """No `**kwargs`: a signature says what it takes. Decorators keep theirs by a ParamSpec."""
    for node in _functions(source):
        kwargs = node.args.kwarg
        if kwargs is not None and not (isinstance(kwargs.annotation, ast.Attribute)):
            yield Violation(source.path, node.lineno, f"{node.name} takes **{kwargs.arg}")


EVERYWHERE: tuple[Rule, ...] = (function_size, file_size)
IN_THE_PRODUCT: tuple[Rule, ...] = (environment, unsafe_loading, generated_modules, words, keyword_pass_through)


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    targets = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
    return any(ast.unparse(target) == "triton.jit" for target in targets)


def _imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def _is_at_the_border(source: Source) -> bool:
    stem = source.path.stem
    if source.package == "paceline_client" and stem == "errors":
        return True
    return (
        stem in {"wire", "_wire", "__main__"}
        or stem.startswith("servicer")
        or not {"servicers", "testing"}.isdisjoint(source.path.parts)
    )


def _defined_names(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Attribute(attr=name)):
                yield node.lineno, name


def _split_words(name: str) -> Iterator[str]:
    parts = chain.from_iterable(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", part) for part in name.split("_"))
    for part in parts:
        word = part.lower()
        yield word
        yield word.removesuffix("s")
        yield re.sub("ies$", "y", word)
