"""Check a target's config and tensors without loading them, or torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from foretoken.models.architectures import architecture_note
from foretoken.models.checkpoint_files import tensor_headers
from foretoken.models.config import ModelConfig, load_config, read_config_file, unread_keys
from foretoken.models.config_keys import unread_note
from foretoken.models.tensor_shapes import check_decoder


def check_target(path: Path) -> tuple[str, ...]:
    """Check a target's folder as loading would; return warnings about its config.

    Raises:
        CheckpointError: the folder cannot be read, or tensors are missing, misshapen or unknown.
        ConfigError: the model type or a feature is not supported; names it.
    """
    config = load_config(path)
    check_decoder(path, tensor_headers(path), config)
    return config_notes(path, config)


def config_notes(path: Path, config: ModelConfig) -> tuple[str, ...]:
    """Return warnings about a model's config.json. ``config``: as loaded from it."""
    file = path / "config.json"
    notes = (*architecture_note(read_config_file(path), file), *unread_note(file, unread_keys(path)))
    return (*notes, *_end_note(config, file))


def log_notes(logger: logging.Logger, notes: Iterable[str]) -> None:
    """Log warnings of a service that loads a model. ``foretoken serve`` has shown them."""
    for note in notes:
        logger.info("%s", note)


def _end_note(config: ModelConfig, file: Path) -> tuple[str, ...]:
    """Return a warning about end tokens that the model can never write."""
    unknown = [str(token) for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    return (f"{file}: eos_token_id {', '.join(unknown)} is not in the vocabulary",) if unknown else ()
