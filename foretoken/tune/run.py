"""``foretoken tune``: from settings and a running server to findings, files and a choice."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken import __version__
from foretoken.bench.client import Address
from foretoken.bench.completion import StreamError
from foretoken.bench.load import default_clients, running_clients
from foretoken.bench.run import prompts_of
from foretoken.bench.sweep import SweepPoint
from foretoken.bench.target import BenchTarget, RequestOptions, served_model
from foretoken.errors import ConfigError, ForetokenError
from foretoken.output_file import write_file
from foretoken.tune import report
from foretoken.tune.candidates import Candidate, TunedDrafter, candidates
from foretoken.tune.choice import LimitedCandidate, choose
from foretoken.tune.settings import TuneSettings
from foretoken.tune.tuner import Findings, Say, Tuner


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """What was found.

    Attributes:
        table: for a terminal.
        lines: what it means.
    """

    table: str
    lines: list[str]
    findings: Findings
    choice: LimitedCandidate
    facts: dict[str, Any]


def candidates_of(settings: TuneSettings, drafters: Sequence[TunedDrafter]) -> list[Candidate]:
    """Return what to try. Raises ConfigError for a drafter that is not there."""
    try:
        return candidates(drafters, settings.try_drafters, settings.draft_shapes)
    except ValueError as error:
        raise ConfigError(f"--try-drafters: {error}") from None


def accepted(tried: Sequence[Candidate], target: BenchTarget, say: Say) -> list[Candidate]:
    """Return the candidates whose requests the server takes.

    Raises StreamError for another refusal.

    A shape may exceed the bounds of the server's flags.
    """
    found = []
    for candidate in tried:
        options = replace(target.options, extra={"speculative": candidate.speculative})
        status, why, _ = replace(target, options=options).trial("one")
        if status == 200:
            found.append(candidate)
        elif status == 400 and "speculative.shape" in why:
            say(f"{candidate.name} is left out: the server's flags do not admit it")
        else:
            raise StreamError(f"{target.address}: status {status}: {why}")
    return found


def check_files(settings: TuneSettings) -> None:
    """Raise ConfigError for a file to write whose folder is not there."""
    files = {
        "--write-config": settings.write_config,
        "--picture": settings.picture,
        "--output-file": settings.output_file,
    }
    for flag, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag}: there is no folder {path.absolute().parent}")


def run(settings: TuneSettings, address: Address, tried: Sequence[Candidate], say: Say) -> TuneOutcome:
    """Measure the candidates, and write picture and JSON. ``say`` gets lines of progress.

    Raises:
        ForetokenError: a setting does not fit, or a request failed.
    """
    options = RequestOptions(settings.endpoint, settings.output_len, settings.temperature)
    target = BenchTarget("server", address, served_model(address), options)
    if settings.dataset_path is None:
        say(
            "prompts are random words, which suit drafters less than text does; for prompts of yours: "
            "--dataset-name file --dataset-path FILE"
        )
    tried = accepted(tried, target, say)
    most = max(SweepPoint(concurrency=batch).num_clients() for batch in settings.batches)
    facts = {
        "version": __version__,
        "began_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": target.model,
        "settings": settings.model_dump(mode="json", exclude={"url"}),
    }
    with running_clients(settings.clients or min(most, default_clients())) as clients:
        tuner = Tuner(settings, tried, target, prompts_of(settings, target), clients, say)
        findings = tuner.run()
    if not report.medians(findings):
        raise ForetokenError("interrupted before anything was measured")
    choice = choose(report.medians(findings), settings.weight_of)
    share = f"{findings.num_rounds} of the full grid's {tuner.num_grid_rounds} rounds in {findings.seconds:.0f} s"
    if findings.is_interrupted:
        share += "; INTERRUPTED, so all of this is preliminary"
    lines = [*report.to_lines(findings, choice), *report.to_caution(choice, settings.dataset_path), share]
    if settings.picture is not None:
        write_file(settings.picture, report.draw(findings, choice), "--picture")
    if settings.output_file is not None:
        content = report.to_content(findings, choice, facts)
        write_file(settings.output_file, json.dumps(content, indent=1) + "\n", "--output-file")
    return TuneOutcome(report.to_table(findings, settings.weight_of), lines, findings, choice, facts)
