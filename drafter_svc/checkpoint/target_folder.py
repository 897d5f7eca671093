"""Find the files of the target that a drafter is attached to."""

from __future__ import annotations

from pathlib import Path

from foretoken.drafting import TargetInfo
from foretoken.errors import PreconditionError


def target_folder(target: TargetInfo, given: Path | None) -> Path:
    """Return the target's checkpoint folder: ``given``, or else the one that the verifier names.

    Raises:
        PreconditionError: the folder is not visible here, or holds no config.json.
    """
    if given is not None:
        if (given / "config.json").is_file():
            return given
        raise PreconditionError(f"--target {given} holds no checkpoint: there is no config.json")
    if target.checkpoint and (Path(target.checkpoint) / "config.json").is_file():
        return Path(target.checkpoint)
    named = (
        f"the verifier's, {target.checkpoint}, is not visible here" if target.checkpoint else "the verifier names none"
    )
    raise PreconditionError(f"this drafter needs the target's checkpoint folder: {named}; name a copy with --target")
