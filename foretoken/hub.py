"""Find a checkpoint: a folder, the bundled demo model, or a hub id that huggingface_hub downloads.

It reads no checkpoint. huggingface_hub has its own settings for endpoint, token, offline mode and
cache folder.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from foretoken.errors import ConfigError

# Weights as safetensors, configs, tokenizers and chat templates: never pickles, never code.
ALLOW_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja")
# Other formats in sub-folders, a second copy of the weights in some repositories, and code and
# pickles whose names begin with ``tokenizer``.
IGNORE_PATTERNS = ("*/*", "consolidated*.safetensors", "*.py", "*.bin", "*.pt")
# What to type as MODEL for the bundled demo model; a folder of that name wins.
DEMO = "demo"
DEMO_SERVED_NAME = "foretoken-demo"
# Seconds that the hub has for one answer.
HUB_TIMEOUT_S = 10.0
# Besides all from 500 up, the answers after which a download tries again.
_RETRIED = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
# What may have been meant by a name without a slash.
_MEANT = "for a folder, check its path; a hub id is ORG/NAME (a few old ones, such as gpt2, have no ORG)"
_NO_ID = " (and it is not a hub id: those are ORG/NAME)"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def default_name(model: str) -> str:
    """Return the default served name of a model: the folder's name, or the hub id."""
    path = Path(model)
    if is_demo(model):
        return DEMO_SERVED_NAME
    return path.resolve().name if path.is_dir() else model


def is_demo(model: str) -> bool:
    """Return whether MODEL means the bundled demo model."""
    return model == DEMO and not Path(model).is_dir()


def demo_folder() -> Path:
    """Return the folder of the demo's target, EAGLE-3 head and token map, in a package or a clone.

    Raises ConfigError if neither has it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "demo", package.parent / "models" / "demo"):
        if (folder / "target").is_dir():
            return folder
    raise ConfigError("the demo model is not in this installation: name a folder or a hub id")


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint; download an uncached hub id, with progress on stderr.

    Raises ConfigError of one line if that fails.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise ConfigError(f"--revision has no meaning for a folder: {model}")
        return path
    if is_demo(model):
        if revision is not None:
            raise ConfigError("--revision has no meaning for the demo model")
        return demo_folder() / "target"
    if path.is_file():
        raise ConfigError(f"expected a folder or a hub id, not a file: {model}")
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"no such folder: {model}")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"no such folder: {model}{_NO_ID}")
    return _download(model, revision)


def config_file(model: str, revision: str | None = None) -> Path | None:
    """Return the ``config.json`` of a checkpoint without the rest of it; None if there is none.

    Raises ConfigError of one line if the hub has no such model, or cannot be asked.
    """
    if not _is_hub_id(model):
        file = (demo_folder() / "target" if is_demo(model) else Path(model).expanduser()) / "config.json"
        return file if file.is_file() else None
    from huggingface_hub import errors, hf_hub_download

    with _plain_errors(model, revision):
        _ask_once(model, revision)
        try:
            return Path(hf_hub_download(model, "config.json", revision=revision))
        except errors.EntryNotFoundError as error:
            if isinstance(error, errors.LocalEntryNotFoundError):
                raise
            return None


def _ask_once(model: str, revision: str | None, file: str = "config.json") -> None:
    """Raise the library's error for a model that is neither cached nor on the hub.

    It is also raised if the hub does not answer. A model is cached if its ``file`` is.

    A download would retry for half a minute and say so eleven times: too long for a machine without
    a network. A hub that answers with an error of its own gets these retries.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, file, revision=revision), str):
        return
    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _RETRIED:
            raise
    except errors.HFValidationError:
        raise
    except Exception as error:  # Errors of the HTTP client, or the hub is switched off.
        raise errors.LocalEntryNotFoundError(str(error)) from error


def cached(model: str, revision: str | None = None) -> Path | None:
    """Return the folder of a checkpoint without a download.

    None if the weights of a hub id are not cached.

    Raises ConfigError as ``resolve``.
    """
    if not _is_hub_id(model):
        return resolve(model, revision)
    from huggingface_hub import errors, snapshot_download

    with _plain_errors(model, revision):
        try:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            return None
    # Perhaps only its config.json is cached.
    return folder if any(folder.glob("*.safetensors")) else None


def check_known(model: str, revision: str | None = None) -> None:
    """Raise ConfigError if there is neither such a folder nor such a model on the hub.

    Downloads nothing.
    """
    if not _is_hub_id(model):
        resolve(model, revision)
        return
    with _plain_errors(model, revision):
        _ask_once(model, revision)


def cache_folder() -> Path:
    """Return where hub ids are downloaded to."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def is_same_folder(one: str, other: str) -> bool:
    """Return whether both texts name one folder."""
    paths = Path(one).expanduser(), Path(other).expanduser()
    return all(path.is_dir() for path in paths) and paths[0].samefile(paths[1])


def resolve_file(name: str) -> Path:
    """Return the path of a file; download ``ORG/NAME/FILE`` from the hub if there is no such file.

    Raises ConfigError of one line if that fails.
    """
    path = Path(name).expanduser()
    model, _, file = name.rpartition("/")
    if path.exists() or name.startswith((".", "/", "~")) or not (model and _HUB_ID.fullmatch(model)):
        # Its reader reports a missing or broken file.
        return path
    from huggingface_hub import hf_hub_download

    with _plain_errors(model, None, file):
        _ask_once(model, None, file)
        return Path(hf_hub_download(model, file))


def _is_hub_id(model: str) -> bool:
    """Return whether MODEL is a hub id: no such path exists, and it does not look like a path."""
    is_path = Path(model).expanduser().exists() or model.startswith((".", "/", "~"))
    return not is_path and not is_demo(model) and _HUB_ID.fullmatch(model) is not None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with _plain_errors(model, revision):
        _ask_once(model, revision)
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(IGNORE_PATTERNS)
        )
    return Path(folder)


@contextmanager
def _without_retry_messages() -> Iterator[None]:
    """Hide the library's warnings, such as a line or two for each retry."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    # Whoever sets a level wants to see them.
    if level == logging.WARNING and "HF_HUB_VERBOSITY" not in os.environ:
        set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(level)


@contextmanager
def _plain_errors(model: str, revision: str | None, file: str = "") -> Iterator[None]:
    """Raise ConfigError of one line for the library's errors about a model or one of its files.

    Hide the library's own messages.
    """
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        with _without_retry_messages():
            yield
    except errors.GatedRepoError:
        raise ConfigError(f"{model} is gated: accept its terms on the hub, then run: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"--revision: the hub has no {revision!r} of {model}") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"no folder and no public hub id: {model} (a private one needs: hf auth login)"
            + ("" if "/" in model else f"; {_MEANT}")
        ) from None
    except errors.HFValidationError:
        raise ConfigError(f"no such folder: {model}{_NO_ID}") from None
    except errors.LocalEntryNotFoundError:
        is_neither = f"/{file} is neither a file nor cached" if file else f"{at} is neither a folder nor a cached model"
        raise ConfigError(
            f"{model}{is_neither}, and the hub does not answer or is switched off; {_without_hub(model, file)}"
        ) from None
    except errors.EntryNotFoundError:
        raise ConfigError(f"there is no file {file} here or in {model}{at} on the hub") from None
    except Exception as error:  # The errors of the library and of its HTTP client share no base.
        raise ConfigError(f"cannot download {model}{at}: {_first_line(error)}") from error


def _without_hub(model: str, file: str) -> str:
    """Return what a user can do whose model or file is not cached while no hub answers."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not file and "/" not in model:
        return _MEANT
    kind = "file" if file else "folder"
    if HF_HUB_OFFLINE:
        return f"pass a {kind}, or unset HF_HUB_OFFLINE"
    return f"pass a {kind}, or try again when the hub answers"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
