"""The held-out packages, which no model of this folder was trained on, and prompts from them.

The default set comes from the standard library, so it depends only on the Python version. This
module needs no training data, no torch and no numpy.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.demo.source_rule import RejectedSource, is_skipped_path, read_source

HELD_OUT_STANDARD_LIBRARY = (
    "argparse",
    "asyncio",
    "concurrent",
    "configparser",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "shelve",
    "statistics",
    "tarfile",
    "unittest",
    "urllib",
    "wsgiref",
    "zipfile",
)
HELD_OUT_DEPENDENCIES = (
    "fastapi",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "httpx",
    "huggingface_hub",
    "prometheus_client",
    "starlette",
    "typer",
    "uvicorn",
)
TEST_DIRECTORIES = frozenset({"test", "tests"})
_MAX_CHARS_PER_TOKEN = 12


class Encoding(Protocol):
    """The result of ``tokenizers`` for a text."""

    @property
    def ids(self) -> list[int]: ...


class TextEncoder(Protocol):
    """A ``tokenizers.Tokenizer`` or a ``transformers`` tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Encoding | list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """The start of a held-out stretch of code, from a top-level statement to a line's end.

    Attributes:
        text: the code; ends with a newline.
        token_ids: its tokens, without special ones.
        file: its source file.
        start_offset: its first character in the file's normalised text (see ``read_source``).
    """

    text: str
    token_ids: tuple[int, ...]
    file: Path
    start_offset: int


def held_out_files(min_bytes: int = 4_096, include_dependencies: bool = False) -> list[Path]:
    """Return held-out source files of at least ``min_bytes`` bytes, ordered by package and path.

    Files in test directories and files that break the junk rule are left out.

    Args:
        min_bytes: the smallest file size.
        include_dependencies: add this project's own dependencies, as far as they are installed.
    """
    paths = sysconfig.get_paths()
    found = list(_package_files(Path(paths["stdlib"]), HELD_OUT_STANDARD_LIBRARY))
    if include_dependencies:
        for root in dict.fromkeys((paths["purelib"], paths["platlib"])):
            found.extend(_package_files(Path(root), HELD_OUT_DEPENDENCIES))
    return [path for path in found if path.stat().st_size >= min_bytes and _is_acceptable(path)]


def held_out_prompts(
    tokenizer: TextEncoder, count: int, min_tokens: int = 200, max_tokens: int = 400, seed: int = 0
) -> list[Prompt]:
    """Return ``count`` prompts from held-out files of the standard library.

    They have ``min_tokens`` to ``max_tokens`` tokens. ``seed`` shuffles the order of files, and
    each visit of a file gives one prompt, so up to ``count`` different files are used. Each prompt
    starts at a top-level statement and ends at a line boundary. No two prompts share a start.

    Raises:
        ValueError: the held-out files have too few prompts.
    """
    generator = random.Random(seed)
    files = held_out_files()
    generator.shuffle(files)
    starts = {path: _statement_starts(read_source(path)) for path in files}
    for offsets in starts.values():
        generator.shuffle(offsets)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        before = len(prompts)
        for path in files:
            wanted = generator.randint(min_tokens, max_tokens)
            text = read_source(path)
            while starts[path] and len(prompts) < count:
                start = starts[path].pop()
                cut = _cut_prompt(tokenizer, text[start : start + max_tokens * _MAX_CHARS_PER_TOKEN], wanted)
                if cut is not None and len(cut[1]) >= min_tokens:
                    prompts.append(Prompt(cut[0], tuple(cut[1]), path, start))
                    break
        if len(prompts) == before:
            raise ValueError(f"the held-out files give only {before} prompts of {min_tokens} tokens or more")
    return prompts


def _package_files(root: Path, packages: Sequence[str]) -> Iterator[Path]:
    for package in packages:
        module, folder = root / f"{package}.py", root / package
        if module.is_file():
            yield module
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(root)
            if not is_skipped_path(relative) and not TEST_DIRECTORIES.intersection(relative.parts):
                yield path


def _is_acceptable(path: Path) -> bool:
    try:
        read_source(path)
    except RejectedSource:
        return False
    return True


def _statement_starts(text: str) -> list[int]:
    """Return the character offsets of top-level statements, decorators included."""
    line_starts = [0]
    for line in text.split("\n"):
        line_starts.append(line_starts[-1] + len(line) + 1)
    starts = set()
    for statement in ast.parse(text).body:
        decorators = getattr(statement, "decorator_list", [])
        starts.add(line_starts[min([statement.lineno, *(each.lineno for each in decorators)]) - 1])
    return sorted(starts)


def _cut_prompt(tokenizer: TextEncoder, text: str, max_tokens: int) -> tuple[str, list[int]] | None:
    """Return as many whole first lines of ``text`` as ``max_tokens`` tokens hold."""
    lines = text.split("\n")[:-1]
    low, high = 0, len(lines)
    best: tuple[str, list[int]] | None = None
    while low < high:
        middle = (low + high + 1) // 2
        candidate = "\n".join(lines[:middle]) + "\n"
        ids = token_ids(tokenizer, candidate)
        if len(ids) <= max_tokens:
            best, low = (candidate, ids), middle
        else:
            high = middle - 1
    return best


def token_ids(tokenizer: TextEncoder, text: str) -> list[int]:
    """Return the text's ids without special tokens, from either kind of tokenizer."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return encoded if isinstance(encoded, list) else encoded.ids
