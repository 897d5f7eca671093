"""Check a target's config and tensors without loading them, or torch."""

from __future__ import annotations

from pathlib import Path

from foretoken.models.checkpoint_files import tensor_headers
from foretoken.models.config import load_config, unread_keys
from foretoken.models.tensor_shapes import check_decoder


def check_target(path: Path) -> tuple[str, ...]:
    """Check a target's folder as loading would; return warnings about unknown config keys.

    Raises:
        CheckpointError: the folder cannot be read, or tensors are missing, misshapen or unknown.
        ConfigError: the model type or a feature is not supported; names it.
    """
    config = load_config(path)
    check_decoder(path, tensor_headers(path), config)
    unread = unread_keys(path)
    return (f"{path / 'config.json'}: not known and ignored: {', '.join(unread)}",) if unread else ()
