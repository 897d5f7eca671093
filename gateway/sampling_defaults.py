"""The sampling defaults that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken import limits
from foretoken.errors import CheckpointError, InvalidRequestError
from foretoken.json_file import read_object
from gateway.config import GatewaySettings

FILE = "generation_config.json"
# A field of the file -> the sampling parameter, as in vLLM. Other fields have no effect, do_sample
# among them; the verifier reads the end tokens.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Parameters of requests that do not set them. Without a file: OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # None: each API has its own.
    max_tokens: int | None = None

    @classmethod
    def of_settings(cls, settings: GatewaySettings) -> SamplingDefaults:
        """Return what ``--generation-config`` asks for. Raises as ``of_checkpoint``."""
        return cls.of_checkpoint(settings.model) if settings.generation_config == "auto" else cls()

    @classmethod
    def of_checkpoint(cls, folder: Path) -> SamplingDefaults:
        """Read a checkpoint's file, if there is one.

        Raises CheckpointError for an unusable file.
        """
        path = folder / FILE
        config = read_object(path) or {}
        values: dict[str, Any] = {}
        for field, parameter in _PARAMETERS.items():
            value = config.get(field)
            if value is None:
                continue
            try:
                limits.check_number(field, value, limits.SAMPLING_RANGES[parameter])
            except InvalidRequestError as error:
                raise CheckpointError(f"{path}: {error.message}; --generation-config none ignores it") from error
            values[parameter] = value
        return cls(**values)

    def of_request(self, source: Any, given: Collection[str]) -> dict[str, Any]:
        """Return the sampling parameters of a request: ``source``'s where it gave them."""
        return {name: getattr(source if name in given else self, name) for name in _SAMPLED}

    def max_tokens_or(self, default: int) -> int:
        """Return the most tokens of a request that does not say: an API's default, or fewer."""
        return default if self.max_tokens is None else min(default, self.max_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the defaults for ``/version``, without those that are not set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


_SAMPLED = tuple(name for name in _PARAMETERS.values() if name != "max_tokens")
