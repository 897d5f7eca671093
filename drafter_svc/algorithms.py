"""The table of algorithms, from which names, settings, flags, checks and messages follow.

A new drafter is one file, which implements foretoken.drafter.Drafter, and one row in
``ALGORITHMS``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from foretoken.config import Settings

Placement = Literal["process", "in-process"]


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    ``maker``, ``checker`` and ``options`` name something in another module as ``module:name``. It
    is imported when it is used: an n-gram drafter loads no torch, and the command line no compiled
    code.

    Attributes:
        name: in capitals, as ``--algorithm`` takes it.
        maker: a function that makes the drafter from DrafterSettings.
        aliases: other names of the same algorithm.
        settings: keys of ``--drafter``, and settings of ``foretoken drafter``, that it takes and
            some others do not.
        needs_model: whether the user must name the folder of a head or model.
        checker: a function that checks the model's files without reading a weight, and returns
            warnings.
        options: a settings class; its fields are flags ``--speculative-NAME-...``. Every command
            imports its module, so that loads no library, nor drafter_svc.config.
        placement: where ``foretoken serve`` runs it unless told otherwise: in a process of its own,
            or in the verifier's. The verifier's thread waits for what runs inside.
    """

    name: str
    maker: str
    aliases: tuple[str, ...] = ()
    settings: frozenset[str] = frozenset()
    needs_model: bool = False
    checker: str = ""
    options: str = ""
    placement: Placement = "process"

    @property
    def field(self) -> str:
        """The settings field that holds its options."""
        return self.name.lower()

    @property
    def keys(self) -> frozenset[str]:
        """All settings that it takes and some others do not."""
        own = {"model": self.needs_model, self.field: bool(self.options)}
        return self.settings | {key for key, is_taken in own.items() if is_taken}

    @property
    def runs_model(self) -> bool:
        """Return whether it runs a model, on the GPU if there is one."""
        return "device" in self.settings

    def check_files(self, model: Path | None, target: Path) -> tuple[str, ...]:
        """Check the folder of the model, or of the target that has it, without reading a weight.

        Return warnings about unknown keys of the model's own config.

        Raises:
            CheckpointError: the folder cannot be read, or holds no such model.
            ConfigError: the model has another algorithm, is for another target or is not supported.
        """
        if not self.checker:
            return ()
        notes: tuple[str, ...] = resolve_name(self.checker)(self.name, model, target)
        return notes

    def options_class(self) -> type[Settings] | None:
        """Return the settings class of its options; None if it has none."""
        return resolve_name(self.options) if self.options else None

    def misfit(self, given: Collection[str]) -> tuple[str, str] | None:
        """Return a setting that is missing or has no effect, and the problem; None if all fit.

        ``given``: the settings that are off their defaults, of those in ``all_keys``.
        """
        if self.needs_model and "model" not in given:
            return "model", f"must be given for a drafter of algorithm {self.name}"
        for key in sorted(set(given) - self.keys):
            takers = ", ".join(row.name for row in ALGORITHMS.values() if key in row.keys)
            return key, f"is for drafters of algorithm {takers}, not for {self.name}"
        return None


_MODEL_SETTINGS = frozenset({"target", "device", "dtype", "threads", "coupled_noise", "disable_cuda_graph"})
_HEAD_SETTINGS = _MODEL_SETTINGS | {"token_map"}
_HEAD_MAKER = "drafter_svc.model.head:make_drafter"
_HEAD_CHECKER = "drafter_svc.checkpoint.model_folder:check_head_folder"

ALGORITHMS = {
    row.name: row
    for row in (
        # It answers in less time than it takes to wake another process.
        Algorithm(
            "NGRAM",
            "drafter_svc.ngram.drafter:make_drafter",
            options="drafter_svc.ngram.settings:NgramSettings",
            placement="in-process",
        ),
        # EAGLE-2 has the weights of EAGLE.
        Algorithm("EAGLE", _HEAD_MAKER, ("EAGLE2",), _HEAD_SETTINGS, needs_model=True, checker=_HEAD_CHECKER),
        Algorithm("EAGLE3", _HEAD_MAKER, (), _HEAD_SETTINGS, needs_model=True, checker=_HEAD_CHECKER),
        # Its layers are in the target's checkpoint.
        Algorithm("MTP", _HEAD_MAKER, ("NEXTN",), _HEAD_SETTINGS, checker=_HEAD_CHECKER),
        Algorithm(
            "STANDALONE",
            "drafter_svc.model.standalone:make_drafter",
            settings=_MODEL_SETTINGS,
            needs_model=True,
            checker="drafter_svc.checkpoint.model_folder:check_draft_model",
        ),
    )
}


def algorithm_names() -> tuple[str, ...]:
    """Return all names and aliases."""
    return tuple(name for row in ALGORITHMS.values() for name in (row.name, *row.aliases))


def find_algorithm(name: str) -> Algorithm:
    """Return the row with a name or alias, in any case. Raises ValueError if there is none."""
    for row in ALGORITHMS.values():
        if name.upper() in (row.name, *row.aliases):
            return row
    *names, last = ALGORITHMS
    raise ValueError(f"expected {', '.join(names)} or {last}")


def all_keys() -> frozenset[str]:
    """Return all settings that some algorithms take and others do not."""
    return frozenset[str]().union(*(row.keys for row in ALGORITHMS.values()))
