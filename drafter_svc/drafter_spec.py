"""``--drafter name=NAME,algorithm=ALGORITHM[,...]``: a drafter that a command starts or runs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from drafter_svc.algorithms import ALGORITHMS, Algorithm, Placement, all_keys
from drafter_svc.config import AlgorithmName, DrafterThreads
from foretoken.config import Settings, build, parse_pairs
from foretoken.drafter_names import FLAG, DrafterName
from foretoken.errors import ConfigError
from foretoken.limits import is_name


class DrafterSpec(Settings):
    """The value of one ``--drafter`` flag."""

    name: DrafterName
    algorithm: AlgorithmName
    # Folder of a head or draft model, or its id on the hub.
    model: str | None = Field(default=None, min_length=1)
    # Target ids that a head may draft.
    token_map: Path | None = None
    threads: DrafterThreads = 0
    # At a temperature, whether it drafts by the sampler's noise.
    coupled_noise: bool = True
    # Where ``foretoken serve`` runs it; None: as --drafter-placement says.
    placement: Placement | None = None

    @property
    def row(self) -> Algorithm:
        """The algorithm's row in the table."""
        return ALGORITHMS[self.algorithm]


def parse_spec(text: str) -> DrafterSpec:
    """Parse the flag's value. Raises ConfigError that names the flag and the key at fault."""
    pairs = parse_pairs(text, FLAG)
    if "address" in pairs:
        # Only ``foretoken verifier`` takes one.
        takers = "foretoken drafters attach, or by foretoken verifier"
        raise ConfigError(f"{FLAG} address: a drafter that runs elsewhere is taken by {takers}")
    spec = build(DrafterSpec, pairs, FLAG)
    if found := spec.row.misfit(spec.model_dump(exclude_defaults=True).keys() & all_keys()):
        key, problem = found
        raise ConfigError(f"{FLAG} {key}: {problem}")
    return spec


def name_in(text: str) -> str:
    """Return the drafter's name in the flag's value; empty if there is no valid one."""
    try:
        name = parse_pairs(text, FLAG).get("name", "")
    except ConfigError:
        return ""
    return name if is_name(name) else ""


def spec_text(spec: DrafterSpec) -> str:
    """Return the flag's value that parses to ``spec``.

    Raises ConfigError if a value has a comma.
    """
    given = spec.model_dump(exclude_defaults=True)
    for key, value in given.items():
        if "," in str(value):
            raise ConfigError(f"a drafter inside the verifier cannot have a comma in its {key}: {value}")
    return ",".join(f"{key}={value}" for key, value in given.items())
