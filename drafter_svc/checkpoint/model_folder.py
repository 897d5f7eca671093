"""Whether a folder holds what a drafter is to run, as far as its configs and the names of its tensors tell.

No weight is read and no torch is loaded, so that a command line can ask before it starts anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from drafter_svc.checkpoint.token_map import check_token_map, load_token_map
from foretoken.errors import CheckpointError, ConfigError, PreconditionError
from foretoken.models.checkpoint_files import tensor_files, tensor_shape
from foretoken.models.config import load_config
from foretoken.models.draft_config import MTP_PREFIXES, HeadConfig, head_config, head_features

Algorithm = Literal["EAGLE", "EAGLE3", "MTP", "STANDALONE"]


def check_folder(algorithm: Algorithm, path: Path | None, target: Path) -> None:
    """``path``: of the head or the draft model, None for MTP; ``target``: the target's folder.

    Raises:
        CheckpointError: a folder that cannot be read, or without what the algorithm drafts with.
        ConfigError: a kind or feature that is not supported, another algorithm's head, or another target's.
    """
    config = load_config(target)
    if algorithm == "STANDALONE":
        assert path is not None, "checked by the settings"
        _check_draft_model(path, target, config.vocab_size)
        return
    head = check_head(algorithm, path or target)
    num_features = len(head_features(head, config.num_layers))
    if head.family != "mtp":
        # EAGLE's takes an embedding beside its one feature, EAGLE-3's its features alone.
        wanted = config.hidden_size * (2 if head.family == "eagle" else num_features)
        name = head.stored_names["fc.weight"]
        *_, width = tensor_shape(tensor_files(path or target)[name], name)
        if width != wanted:
            raise ConfigError(f"{path} is a head for another target: {name} takes {width} values, not {wanted}")


def check_map(path: Path, target: Path, head: Path) -> None:
    """Raises ConfigError for a file that is no token map of this target, or a head that takes none."""
    if head_config(head).draft_vocab_size is not None:
        raise ConfigError(f"{head} has an output head of its own, which has its own choice of tokens")
    try:
        check_token_map(load_token_map(path), load_config(target).vocab_size)
    except PreconditionError as error:
        raise ConfigError(error.message) from error


def check_head(algorithm: Algorithm, path: Path) -> HeadConfig:
    """The head in ``path``, which is of the algorithm. Raises as ``check_folder``."""
    if algorithm == "MTP" and not any(name.startswith(MTP_PREFIXES) for name in tensor_files(path)):
        named = " or ".join(f"{prefix}*" for prefix in MTP_PREFIXES)
        raise CheckpointError(f"{path} has no MTP layers: it holds no tensor {named}")
    head = head_config(path)
    if head.family != algorithm.lower():
        raise ConfigError(f"{path} holds a head of algorithm {head.family.upper()}, not of {algorithm}")
    return head


def _check_draft_model(path: Path, target: Path, vocab_size: int) -> None:
    # Reads tokenizers, which a head does without.
    from drafter_svc.checkpoint.tokenizer_match import check_same_tokenizer

    draft = load_config(path)
    tensor_files(path)
    if draft.vocab_size != vocab_size:
        raise ConfigError(f"{path} has a vocabulary of {draft.vocab_size} tokens, the target one of {vocab_size}")
    try:
        check_same_tokenizer(path, target)
    except PreconditionError as error:
        raise ConfigError(error.message) from error
