"""Refuse classes of more than 20 methods or 20 attributes. `make lint` runs it.

    python .ci/class_sizes.py

The fields of frozen records, settings and request models do not count, since nothing changes them.
A class that must be larger says why on its own line: `class Name:  # large: REASON`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

MOST_METHODS = MOST_ATTRIBUTES = 20
RECORD_BASES = {"NamedTuple", "BaseModel", "Settings"}


def classes(path: Path) -> list[tuple[ast.ClassDef, str]]:
    """Return the classes of a file, each with the source line that names it."""
    source = path.read_text()
    lines = source.splitlines()
    return [(node, lines[node.lineno - 1]) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)


def dataclass_decorator(node: ast.ClassDef) -> ast.expr | None:
    """Return the decorator that makes the class a dataclass, if it has one."""
    return next((decorator for decorator in node.decorator_list if "dataclass" in ast.unparse(decorator)), None)


def num_attributes(node: ast.ClassDef) -> int:
    """Count a dataclass's fields, and what any class's methods assign to ``self``."""
    names = set()
    for item in ast.walk(node):
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        for target in targets:
            for part in ast.walk(target) if isinstance(target, ast.AST) else ():
                is_own = (
                    isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                )
                if is_own and isinstance(part.ctx, ast.Store):
                    names.add(part.attr)
    if dataclass_decorator(node) is not None:
        names |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        }
    return len(names)


def is_record(node: ast.ClassDef) -> bool:
    """Return whether nothing changes the fields: a frozen record, settings, a pydantic model."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    decorator = dataclass_decorator(node)
    is_frozen = isinstance(decorator, ast.Call) and any(
        keyword.arg == "frozen" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in decorator.keywords
    )
    return bool(bases & RECORD_BASES) or any(base.endswith("Settings") for base in bases) or is_frozen


def too_large(path: Path) -> list[str]:
    found = []
    for node, line in classes(path):
        methods, attributes = num_methods(node), 0 if is_record(node) else num_attributes(node)
        if "# large: " not in line and (methods > MOST_METHODS or attributes > MOST_ATTRIBUTES):
            found.append(f"{path}:{node.lineno}: {node.name} has {methods} methods and {attributes} attributes")
    return found


def main() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    found = [line for name in files if "_pb2" not in name and Path(name).exists() for line in too_large(Path(name))]
    print("\n".join(found) or f"no class has more than {MOST_METHODS} methods or {MOST_ATTRIBUTES} attributes")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
