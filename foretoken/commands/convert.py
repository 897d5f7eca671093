"""Convert checkpoints and token maps from pickles (.bin, .pt) to safetensors.

Only a separate process with limits reads a pickle, with torch's ``weights_only``, which runs no
code from the file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from foretoken.errors import CheckpointError, ConfigError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_INDEX = "pytorch_model.bin.index.json"
_WORKER = Path(__file__).with_name("convert_worker.py")
# Files that a drafter's folder needs besides its tensors.
_COPIED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


@dataclass(frozen=True, slots=True)
class ConvertLimits:
    """Limits for one file; a file that exceeds one is refused."""

    max_bytes: int = 32 * 1024**3
    max_tensors: int = 100_000
    timeout_s: int = 600


def convert(source: Path, destination: Path, limits: ConvertLimits | None = None) -> list[Path]:
    """Convert a checkpoint folder, or one file to one safetensors file; return the files written.

    A list or one-dimensional tensor of token ids (an FR-Spec map) becomes the int64 tensor
    ``token_map``.

    Raises:
        ConfigError: the source cannot be converted, or the destination exists.
        CheckpointError: a file is refused or broken; the message names it.
    """
    limits = limits or ConvertLimits()
    if source.is_file():
        return _convert_single(source, destination, limits)
    if not source.is_dir():
        raise ConfigError(f"{source} does not exist")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists and is not an empty folder")
    plan = _plan(source)
    with _staging(destination) as stage:
        places = _convert_shards(source, stage, plan, limits)
        if len(plan) > 1:
            index = {"metadata": {}, "weight_map": places}
            (stage / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, stage / name)
        destination.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(file, destination / file.name)) for file in sorted(stage.iterdir())]


def _convert_single(source: Path, destination: Path, limits: ConvertLimits) -> list[Path]:
    if source.suffix not in PICKLE_SUFFIXES:
        raise ConfigError(f"{source}: expected a name that ends in {', '.join(PICKLE_SUFFIXES)}")
    if destination.suffix != ".safetensors":
        raise ConfigError(f"{destination}: one file becomes one file, whose name must end in .safetensors")
    if destination.exists():
        raise ConfigError(f"{destination} exists")
    with _staging(destination) as stage:
        _convert_file(source, stage / destination.name, limits)
        shutil.move(stage / destination.name, destination)
    return [destination]


def _plan(source: Path) -> dict[str, str]:
    """Return the name of each pickle in the folder, with the name of its safetensors file."""
    if any(source.glob("*.safetensors")):
        raise ConfigError(f"{source} holds safetensors already")
    if (source / _INDEX).is_file():
        names = sorted(set(_weight_map(source / _INDEX).values()))
        return {name: name.removeprefix("pytorch_").rsplit(".", 1)[0] + ".safetensors" for name in names}
    files = [file.name for file in sorted(source.iterdir()) if file.suffix in PICKLE_SUFFIXES]
    chosen = ["pytorch_model.bin"] if "pytorch_model.bin" in files else files
    if len(chosen) != 1:
        found = ", ".join(chosen) or "none"
        raise ConfigError(f"{source}: expected {_INDEX}, pytorch_model.bin or one pickle, found {found}")
    return {chosen[0]: "model.safetensors"}


def _weight_map(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): str(place) for name, place in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not an index of shards: {error!r}") from error
    for place in places.values():
        if Path(place).name != place or Path(place).suffix not in PICKLE_SUFFIXES:
            raise CheckpointError(f"{file} names {place!r}, which is not a pickle in its folder")
    return places


def _convert_shards(source: Path, stage: Path, plan: dict[str, str], limits: ConvertLimits) -> dict[str, str]:
    """Convert all files; return the file of each tensor.

    Raises CheckpointError if two files hold the same tensor or the index names a missing one.
    """
    places: dict[str, str] = {}
    for pickle_name, name in plan.items():
        for tensor in _convert_file(source / pickle_name, stage / name, limits):
            if tensor in places:
                raise CheckpointError(f"{source / pickle_name}: tensor {tensor!r} is in another file too")
            places[tensor] = name
    if len(plan) > 1:
        missing = sorted(_weight_map(source / _INDEX).keys() - places.keys())
        if missing:
            raise CheckpointError(f"{source / _INDEX}: tensor {missing[0]!r} is in no file")
    return places


def _convert_file(source: Path, output: Path, limits: ConvertLimits) -> list[str]:
    """Convert one file to ``output``; return the names of its tensors."""
    try:
        size = source.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{source}: {error.strerror}") from error
    if size > limits.max_bytes:
        raise CheckpointError(f"{source}: {size} bytes are more than the limit of {limits.max_bytes}")
    answer = _ask_worker(source, output, limits)
    if "error" in answer:
        raise CheckpointError(f"{source}: {answer['error']}")
    try:
        with safe_open(output, framework="np") as file:
            written = sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source}: the worker wrote no safetensors file: {error}") from error
    if written != sorted(answer["names"]):
        raise CheckpointError(f"{source}: the worker wrote other tensors than it named")
    return written


def _ask_worker(source: Path, output: Path, limits: ConvertLimits) -> dict[str, Any]:
    request = {
        "source": str(source.resolve()),
        "output": str(output.resolve()),
        "max_bytes": limits.max_bytes,
        "max_tensors": limits.max_tensors,
        "cpu_s": limits.timeout_s,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_WORKER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=limits.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{source}: not read within {limits.timeout_s} s") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise CheckpointError(
            f"{source}: the process that read it ended with status {done.returncode}: {last}"
        ) from error
    return answer if isinstance(answer, dict) else {"error": "the process that read it gave no answer"}


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """Make a temporary folder beside the destination, so that a failure leaves nothing there."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".convert-") as folder:
        yield Path(folder)
