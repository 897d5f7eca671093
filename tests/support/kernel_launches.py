"""A pytest plugin (``-p tests.support.kernel_launches``) that lists the launched GPU kernels."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import foretoken_kernels
import pytest

FOLDER = Path(foretoken_kernels.__file__).parent / "gpu"
LINE = "launched kernels:"
_launched: set[str] = set()


def _kinds() -> tuple[Any, ...]:
    """Return the types that Triton compiles.

    Triton is imported late: tests/conftest.py decides first whether it interprets.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return JITFunction, InterpretedFunction


def all_kernels() -> set[str]:
    """Return the names of Triton functions that no other calls: the rest are device functions."""
    kinds = _kinds()
    compiled: dict[str, str] = {}
    called: set[str] = set()
    for file in FOLDER.glob("*.py"):
        module = importlib.import_module(f"foretoken_kernels.gpu.{file.stem}")
        for name, value in vars(module).items():
            if isinstance(value, kinds) and value.fn.__module__ == module.__name__:
                compiled[name] = value.fn.__name__
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        called |= {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return {function for name, function in compiled.items() if name not in called}


def pytest_configure() -> None:
    for kind in _kinds():
        _watch(kind)


def _watch(kind: Any) -> None:
    run = kind.run

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        _launched.add(self.fn.__name__)
        return run(self, *args, **options)

    kind.run = watched


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{LINE} {' '.join(sorted(_launched & all_kernels()))}")


def launched(output: str) -> set[str]:
    """Return the kernels that a run with this plugin has listed."""
    lines = [line for line in output.splitlines() if line.startswith(LINE)]
    return set(lines[-1].removeprefix(LINE).split()) if lines else set()
