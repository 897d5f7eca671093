"""Check that a folder holds what a drafter runs, by its configs and the names of its tensors.

Reads no weight and loads no torch, so that the command line can check before it starts anything.
"""

from __future__ import annotations

from pathlib import Path

from drafter_svc.checkpoint.token_map import check_token_map, load_token_map
from foretoken.errors import CheckpointError, ConfigError, PreconditionError
from foretoken.models.checkpoint_files import tensor_files, tensor_headers
from foretoken.models.config import load_config
from foretoken.models.config_keys import unread_note
from foretoken.models.draft_config import MTP_PREFIXES, USE_ANOTHER, HeadConfig, head_captured_layers, head_config
from foretoken.models.head_shapes import check_head_tensors
from foretoken.models.target_check import config_notes
from foretoken.models.tensor_shapes import check_decoder


def check_head_folder(algorithm: str, path: Path | None, target: Path) -> tuple[str, ...]:
    """Check the folder of a head; ``path``: None for MTP, whose head is in the target's.

    Return warnings about unknown keys of the head's own config.

    Raises:
        CheckpointError: the folder cannot be read, or holds no head.
        ConfigError: the head is not supported, or is of another algorithm or target.
    """
    config = load_config(target)
    head = check_head(algorithm, path or target)
    num_states = len(head_captured_layers(head, config.num_layers))
    headers = tensor_headers(path or target)
    if head.family != "mtp":
        # EAGLE reads an embedding and one hidden state, EAGLE-3 its hidden states only.
        wanted = config.hidden_size * (2 if head.family == "eagle" else num_states)
        name = head.stored_names["fc.weight"]
        *_, width = headers[name].shape
        if width != wanted:
            raise ConfigError(
                f"{path} is a head for another target: {name} takes {width} values, not {wanted}",
                advice=USE_ANOTHER,
            )
    check_head_tensors(path or target, headers, head, config)
    return head_notes(path or target, head)


def head_notes(path: Path, head: HeadConfig) -> tuple[str, ...]:
    """Return warnings about the config of the head in ``path``."""
    return unread_note(path / "config.json", head.unread_keys)


def check_map(path: Path, target: Path, head: Path) -> None:
    """Check a token map.

    Raises ConfigError for a file that is none for this target, or a head that takes none.
    """
    if head_config(head).draft_vocab_size is not None:
        raise ConfigError(f"{head} has an output head of its own, which has its own choice of tokens")
    try:
        check_token_map(load_token_map(path), load_config(target).vocab_size)
    except PreconditionError as error:
        raise ConfigError(error.message) from error


def check_head(algorithm: str, path: Path) -> HeadConfig:
    """Return the config of the head in ``path``.

    Raises ConfigError or CheckpointError if the folder holds no head of the algorithm.
    """
    if algorithm == "MTP" and not any(name.startswith(MTP_PREFIXES) for name in tensor_files(path)):
        named = " or ".join(f"{prefix}*" for prefix in MTP_PREFIXES)
        raise CheckpointError(f"{path} has no MTP layers: it holds no tensor {named}")
    head = head_config(path)
    if head.family != algorithm.lower():
        found = head.family.upper()
        # MTP layers are no head in a folder of its own.
        advice = f"use algorithm {found}" if found != "MTP" else "serve that model itself, with algorithm MTP"
        raise ConfigError(f"{path} holds a head of algorithm {found}, not of {algorithm}", advice=advice)
    return head


def check_draft_model(algorithm: str, path: Path | None, target: Path) -> tuple[str, ...]:
    """Check the folder of a model of the target's vocabulary.

    Return and raise as ``check_head_folder``.
    """
    # Imports the tokenizers library, which a head does without.
    from drafter_svc.checkpoint.tokenizer_match import check_same_tokenizer

    assert path is not None, f"settings of {algorithm} without a model"
    vocab_size = load_config(target).vocab_size
    draft = load_config(path)
    headers = tensor_headers(path)
    if draft.vocab_size != vocab_size:
        raise ConfigError(f"{path} has a vocabulary of {draft.vocab_size} tokens, the target one of {vocab_size}")
    try:
        check_same_tokenizer(path, target)
    except PreconditionError as error:
        raise ConfigError(error.message) from error
    check_decoder(path, headers, draft)
    return config_notes(path, draft)
