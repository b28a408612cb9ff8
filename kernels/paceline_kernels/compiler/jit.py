"""How the CPU kernels are compiled: without the GIL, with IEEE arithmetic as written, kept on disk where that works.

Knows numba's switches and where compiled code is kept. It refuses to know what a kernel computes.

Most functions are called by compiled code alone (`compiled`). What Python would call them by takes a third of the
compiler's time, so only those have it that Python does call (`compiled_for_python`, `compiled_parallel`).

No kernel is compiled with `fastmath`: a float operation then gives the same bits however the compiler vectorises the
loop around it, and sums stay in the order in which they are written. What must be both fast and a sum is in `simd`.
"""

import contextlib
import contextvars
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

from paceline_kernels.compiler.compile_lock import CompileLock

# Numbers inside compiled code. Type checkers keep numpy's scalars and Python's floats apart; compiled code does not.
Float32: TypeAlias = Any
Int32: TypeAlias = Any
Int64: TypeAlias = Any

# Files, by the beginning of their name, and folders that no CPU code is made of.
_ONLY_FOR_OTHERS = ("reference", "triton", "testing", "gpu")

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., object])
# Processes that start together compile every function once: what one compiles, the others load.
_lock = CompileLock()
_takes_only_kept = contextvars.ContextVar("takes_only_kept", default=False)
# numba sets its switches at run time, out of a type checker's sight.
_config: Any = numba.config
_numba_njit: Any = numba.njit


def _cache_folder(named: str = "") -> str:
    """Compiled code sits beside the package, or in NUMBA_CACHE_DIR, keyed by all its files but `_ONLY_FOR_OTHERS`.

    numba recompiles a function when its own file changes, but not when a file that it inlines does; hence the digest.
    Where the folder is read-only, numba falls back to the user's cache folder, and where that is too, to compiling.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        if not source.name.startswith(_ONLY_FOR_OTHERS) and source.parent.name not in _ONLY_FOR_OTHERS:
            digest.update(source.read_bytes())
    return str(Path(named or package / "__pycache__") / f"kernels-{digest.hexdigest()[:16]}")


_config.CACHE_DIR = _cache_folder(_config.CACHE_DIR)
# One OpenMP pool that spins between regions is 1.5 to 3 times faster here than tbb or workqueue; the others serve
# where numba's OpenMP layer cannot be loaded.
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


class NotKeptError(Exception):
    """A function is not on disk, and was not to be compiled."""


def compiled(function: _Function) -> _Function:
    """Compile a function that compiled code calls, for the thread that does. Called by Python it raises TypeError."""
    dispatcher: Any = _compile(function, is_for_python=False)
    dispatcher.__class__ = _Inner
    inner: _Function = dispatcher
    return inner


def compiled_for_python(function: _Function) -> _Function:
    """Compile a function that Python calls, for the calling thread."""
    return _compile(function)


def compiled_parallel(function: _Function) -> _Function:
    """Compile a function whose `prange` loops run on `num_threads()` threads. Only one thread may ever call such."""
    return _compile(function, parallel=True)


@contextlib.contextmanager
def only_kept() -> Iterator[None]:
    """Within this context functions whose code could be on disk, and is not, raise NotKeptError when called."""
    token = _takes_only_kept.set(True)
    try:
        yield
    finally:
        _takes_only_kept.reset(token)


def _compile(function: _Function, *, parallel: bool = False, is_for_python: bool = True) -> _Function:
    try:
        kept: Any = _njit(function, parallel=parallel, is_for_python=is_for_python, cache=True)
        cache = _ForgivingCache(function, is_for_python=is_for_python)
    except RuntimeError:
        _tell_not_kept("no folder for them can be written to")
        return _njit(function, parallel=parallel, is_for_python=is_for_python, cache=False)
    kept._cache = cache  # noqa: SLF001 - numba has no other way
    kept.compile = cache.releasing(kept.compile)
    dispatcher: _Function = kept
    return dispatcher


class _Inner(CPUDispatcher):  # type: ignore[misc]  # numba has no types
    """A function without what Python would call it by: numba would jump to nowhere."""

    def __call__(self, *_: object) -> NoReturn:
        """Refuse."""
        problem = f"only compiled code calls {self.__name__}: for Python it would have to be compiled_for_python"
        raise TypeError(problem)


class _ForgivingCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Compiled code of one function on disk. A disk that is full or damaged costs time, and nothing else.

    Who finds nothing holds the function's lock from then on until `releasing` ends.
    """

    def __init__(self, function: Callable[..., object], *, is_for_python: bool) -> None:
        super().__init__(function)
        self._is_for_python = is_for_python

    def _index_key(self, sig: object, codegen: object) -> tuple[object, ...]:
        # What was made without Python's way to call it must not be found by who needs that.
        return (*super()._index_key(sig, codegen), self._is_for_python)

    def releasing(self, compile_function: Callable[[object], object]) -> Callable[[object], object]:
        """The same function, which looks here and then compiles; what it locked is free afterwards."""

        def compile_and_release(signature: object) -> object:
            try:
                return compile_function(signature)
            finally:
                _lock.release(*self._place())

        return compile_and_release

    def save_overload(self, sig: object, data: object) -> None:
        """Keep compiled code, if there is room."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell_not_kept(error.strerror or str(error))

    def load_overload(self, sig: object, target_context: object) -> object:
        """Return compiled code; None where there is none, or none that can be read: then it is for us to compile."""
        found = self._load(sig, target_context)
        if found is None and _takes_only_kept.get():
            raise NotKeptError(self._impl.filename_base)
        if found is None:
            _lock.take(*self._place())
            found = self._load(sig, target_context)
        return found

    def _load(self, sig: object, target_context: object) -> object:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # pickle raises anything for a file that was cut
            _log.warning("compiled kernels that were kept are damaged, and are compiled again: %r", error)
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def _place(self) -> tuple[Path, str]:
        """The file with all functions' locks, and the name of this function's."""
        folder = Path(self.cache_path)
        return folder.parent / "paceline.lock", f"{folder.name}/{self._impl.filename_base}"


@functools.cache
def _tell_not_kept(reason: str) -> None:
    """Say so once, not for every kernel."""
    _log.warning("compiled kernels are not kept, every start compiles them: %s", reason)


def _njit(function: _Function, *, parallel: bool, is_for_python: bool, cache: bool) -> _Function:
    dispatcher: _Function = _numba_njit(
        nogil=True,
        error_model="numpy",
        parallel=parallel,
        cache=cache,
        no_cpython_wrapper=not is_for_python,
        no_cfunc_wrapper=True,
    )(function)
    return dispatcher


def max_threads() -> int:
    """The largest thread count `set_num_threads` takes, fixed when the process starts."""
    return int(_config.NUMBA_NUM_THREADS)


def set_num_threads(num_threads: int) -> None:
    """Let `prange` loops started by the calling thread use this many threads, 1 to `max_threads()`."""
    numba.set_num_threads(num_threads)


def num_threads() -> int:
    """How many threads the `prange` loops of the calling thread use."""
    return int(numba.get_num_threads())
