"""Compile functions with numba, and keep the results on disk between runs.

Only functions that Python calls are cached. numba's own cache watches one source file, so it would
miss a change in a file whose functions are inlined. Here the digest of the function's folder and of
this one decides whether a cached function is valid.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import llvmlite.ir
import numba
import numba.core.caching
import numba.core.ccallback
import numba.core.cgutils
import numba.extending

Function = TypeVar("Function", bound=Callable[..., Any])

# These modules are only partly typed, so mypy gets all of them as Any.
ir: Any = llvmlite.ir
_binding: Any = llvmlite.binding
_numba: Any = numba
types = _numba.types
carray = _numba.carray
cgutils: Any = numba.core.cgutils
_caching: Any = numba.core.caching


def cpu_has(feature: str) -> bool:
    """Return whether this machine's CPU has a feature, by LLVM's name for it."""
    return bool(_binding.get_host_cpu_features().get(feature, False))


def cache_folder() -> Path | None:
    """Return the folder where numba keeps compiled functions.

    It is None if none was set.
    """
    found = _numba.config.CACHE_DIR
    return Path(found) if found else None


def facts() -> dict[str, str]:
    """Return what compiled code depends on besides its source: compiler, settings, CPU."""
    config = _numba.config
    settings = {
        name: value
        for name in dir(config)
        if name.isupper() and isinstance(value := getattr(config, name), str | int | float | None)
    }
    return {
        "numba": f"{_numba.__version__} {sorted(settings.items())}",
        "llvm": f"{llvmlite.__version__} {_binding.llvm_version_info}",
        "host": f"{_binding.get_host_cpu_name()} {_binding.get_host_cpu_features().flatten()}",
    }


def emitted(typed: Callable[..., Any]) -> Any:
    """Make an operation whose instructions ``typed`` builds (numba's ``intrinsic``)."""
    return numba.extending.intrinsic(typed)


def inlined(function: Function) -> Function:
    """Compile a function that only other compiled functions call."""
    return cast(Function, _numba.njit(error_model="numpy")(function))


def inlined_uncounted(function: Function) -> Function:
    """Do as ``inlined``, without reference counts: for functions that make no array.

    Each call of a compiled function counts every array that it gets, which took more than half of
    the n-gram drafter's time. Slices of given arrays may be made, but no views of other memory.
    """
    return cast(Function, _numba.njit(error_model="numpy", _nrt=False)(function))


def compiled(function: Function) -> Function:
    """Compile a function that Python calls: it releases the GIL and is cached on disk."""
    return _cached(function, _numba.njit(nogil=True, error_model="numpy"))


def compiled_uncounted(function: Function) -> Function:
    """Do as ``compiled``, without reference counts: see ``inlined_uncounted``."""
    return _cached(function, _numba.njit(nogil=True, error_model="numpy", _nrt=False))


def _cached(function: Function, compiler: Callable[[Function], Any]) -> Function:
    dispatcher = compiler(function)
    # numba may write to no folder: each process compiles.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _FolderCache(function)
    return cast(Function, dispatcher)


def callback(function: Callable[..., Any]) -> Any:
    """Compile ``function`` as a C function ``void f(void *)``, and cache it on disk.

    The result's ``address`` is valid while the result lives.
    """
    signature = _numba.void(types.voidptr)
    parts = (signature.args, signature.return_type)
    compiled_callback: Any = numba.core.ccallback.CFunc(function, parts, {}, {"error_model": "numpy"})
    compiled_callback._cache = _FolderCache(function)
    compiled_callback.compile()
    return compiled_callback


@cache
def _digest(folder: Path) -> str:
    """Return a digest of the sources in a folder and in this one."""
    digest = hashlib.sha256()
    for path in sorted({*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _FolderCache(numba.core.caching.FunctionCache):
    """numba's function cache, stamped with the digest of a folder instead of one file's date."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parent: Any = super()
        parent.__init__(function)
        self._cache_file = _caching.IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_digest(Path(function.__code__.co_filename).parent),
        )
