"""How the CPU kernels are compiled: without the GIL, with IEEE arithmetic as written, cached on disk.

Knows numba's switches and where compiled code is kept. It refuses to know what a kernel computes.

No kernel is compiled with `fastmath`: a float operation then gives the same bits however the compiler vectorises the
loop around it, and sums stay in the order in which they are written. What must be both fast and a sum is in `simd`.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numba

# Numbers inside compiled code. Type checkers keep numpy's scalars and Python's floats apart; compiled code does not.
Float32: TypeAlias = Any
Int32: TypeAlias = Any

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., object])
# numba sets its switches at run time, out of a type checker's sight.
_config: Any = numba.config
_numba_njit: Any = numba.njit


def _cache_folder() -> str:
    """Compiled code sits beside the package, keyed by all of the package's files but references and `testing`.

    numba recompiles a function when its own file changes, but not when a file that it inlines does; hence the digest.
    Where the folder is read-only, numba falls back to the user's cache folder.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        if source.name != "reference.py" and source.parent.name != "testing":
            digest.update(source.read_bytes())
    return str(package / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}")


if not _config.CACHE_DIR:
    _config.CACHE_DIR = _cache_folder()
# One OpenMP pool that spins between regions is 1.5 to 3 times faster here than tbb or workqueue; the others serve
# where numba's OpenMP layer cannot be loaded.
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def compiled(function: _Function) -> _Function:
    """Compile a function for the calling thread."""
    return _compile(function, parallel=False)


def compiled_parallel(function: _Function) -> _Function:
    """Compile a function whose `prange` loops run on `num_threads()` threads. Only one thread may ever call such."""
    return _compile(function, parallel=True)


def _compile(function: _Function, *, parallel: bool) -> _Function:
    try:
        return _njit(function, parallel=parallel, cache=True)
    except RuntimeError as error:
        _log.warning("compiled kernels are not kept, every start compiles them: %s", error)
        return _njit(function, parallel=parallel, cache=False)


def _njit(function: _Function, *, parallel: bool, cache: bool) -> _Function:
    dispatcher: _Function = _numba_njit(nogil=True, error_model="numpy", parallel=parallel, cache=cache)(function)
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
