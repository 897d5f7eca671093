"""Check that each token id means the same text in two checkpoints."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from foretoken.errors import PreconditionError


def check_same_tokenizer(draft_folder: Path, target_folder: Path) -> None:
    """Compare two tokenizers.

    Raises PreconditionError that names the first difference or a missing file.
    """
    draft, target = _texts(draft_folder), _texts(target_folder)
    for token_id in sorted(draft.keys() | target.keys()):
        ours, theirs = draft.get(token_id), target.get(token_id)
        if ours != theirs:
            raise PreconditionError(
                f"the draft model's tokenizer ({len(draft)} tokens) is not the target's ({len(target)} tokens): "
                f"token {token_id} is {_shown(ours)} in the draft model and {_shown(theirs)} in the target"
            )


def _texts(folder: Path) -> dict[int, str]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise PreconditionError(f"{path} does not exist: the tokenizers of draft model and target cannot be compared")
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # The library raises plain Exception for a file that it cannot read.
        raise PreconditionError(f"{path}: {error}") from error
    return {token_id: text for text, token_id in vocabulary.items()}


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(text)
