"""``foretoken bench``: from settings to a report."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from foretoken import __version__
from foretoken.bench import report
from foretoken.bench.client import Address
from foretoken.bench.load import default_clients, running_clients
from foretoken.bench.prompts import CountTokens, Lengths, LoadPrompt, random_prompts, read_prompts, repeated
from foretoken.bench.settings import BenchSettings, LoadSettings
from foretoken.bench.sweep import Prompts, Row, Sweep, SweepPoint
from foretoken.bench.target import (
    DEFAULT_OUTPUT_LEN,
    BenchTarget,
    RequestOptions,
    served_model,
    takes_ignore_eos,
    text_maker,
)
from foretoken.config import flag_of, settings_of
from foretoken.errors import ConfigError, ForetokenError
from foretoken.output_file import write_file

# Between two lines of progress of one measurement.
PROGRESS_S = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """What was measured.

    Attributes:
        text: tables for a terminal.
        failures: a line for each kind of failed requests.
    """

    text: str
    failures: list[str]
    rows: list[Row]


def run(settings: BenchSettings, say: Say) -> BenchOutcome:
    """Make all measurements and write the files. ``say`` gets lines of progress and warnings.

    Raises:
        ForetokenError: a setting does not fit, a server does not answer, or the warm-up failed.
    """
    targets = [_checked(target, say) for target in _targets(settings)]
    points = points_of(settings)
    prompts = prompts_of(settings, targets[0])
    most = max(point.num_clients() for point in points)
    names = [target.name for target in targets]
    facts = _facts(settings, targets)
    rows: list[Row] = []
    with running_clients(settings.clients or min(most, default_clients())) as clients:
        sweep = Sweep(
            targets=targets,
            points=points,
            prompts=prompts,
            clients=clients,
            rounds=settings.rounds,
            num_prompts=settings.num_prompts,
            duration_s=settings.duration_s or math.inf,
            timeout_s=settings.read_timeout_s,
            seed=settings.seed,
            bounds=settings.bounds,
        )
        if failures := sweep.warm_up(settings.warmup_requests):
            raise ForetokenError(f"{len(failures)} requests of the warm-up failed: {failures[0]}")
        for row in sweep.rows(_Progress(say)):
            rows.append(row)
            say(_line(row))
            if settings.output_file is not None:
                content = report.to_content(rows, names, facts)
                write_file(settings.output_file, json.dumps(content, indent=1) + "\n", "--output-file")
    if settings.picture is not None and report.measured(rows):
        write_file(settings.picture, report.draw(rows), "--picture")
    for line in report.bottlenecks(rows):
        say(line)
    return BenchOutcome(_text(rows, names), report.failures(rows), rows)


def points_of(settings: BenchSettings) -> list[SweepPoint]:
    """Return the loads to measure: one for each concurrency and each rate."""
    concurrencies = settings.max_concurrency or (() if settings.request_rate else (1,))
    return [SweepPoint(concurrency=number) for number in concurrencies] + [
        SweepPoint(rate=rate) for rate in settings.request_rate
    ]


def _targets(settings: BenchSettings) -> list[BenchTarget]:
    """Return one server, named by its model, or the two to compare."""
    options = RequestOptions(
        endpoint=settings.endpoint,
        output_len=settings.output_len,
        temperature=settings.temperature,
        ignore_eos=not settings.disable_ignore_eos,
        salted=settings.salt_requests,
        extra=settings.extra_request_body,
    )
    first = address_of(settings.url, settings.api_key, "")
    if settings.compare_url is None:
        model = settings.model or served_model(first)
        return [BenchTarget(model, first, model, options)]
    second = address_of(settings.compare_url, settings.compare_api_key or settings.api_key, "compare_")
    # What the first request of a pair left in the cache would serve the second one.
    is_same = str(first) == str(second)
    options = replace(options, salted=options.salted or is_same)
    extra = settings.compare_extra_request_body
    others = replace(options, extra=settings.extra_request_body if extra is None else extra)
    return [
        BenchTarget("first", first, settings.model or served_model(first), options),
        BenchTarget("second", second, settings.compare_model or served_model(second), others),
    ]


def address_of(url: str, key: SecretStr | None, prefix: str) -> Address:
    """Return a server's address; ``url`` may lack a scheme or end in /v1.

    Of several keys the first counts.

    ``prefix``: how the names of the server's fields begin.

    Raises ConfigError that names the flag if ``url`` is no address.
    """
    url = url.rstrip("/").removesuffix("/v1")
    keys = key.get_secret_value().split() if key is not None else []
    try:
        address = Address.parse(url if "://" in url else f"http://{url}", keys[0] if keys else "")
    except ValueError as error:
        raise ConfigError(f"{flag_of(BenchSettings, f'{prefix}url')}: {error}") from None
    flags = {setting.path: setting for setting in settings_of(BenchSettings)}
    setting = flags[f"{prefix}api_key",]
    return replace(address, key_from=f"{setting.shown.env} or {setting.flag}")


def _checked(target: BenchTarget, say: Say) -> BenchTarget:
    """Return a target whose requests the server takes. Raises ForetokenError if it takes none."""
    if target.options.ignore_eos and not takes_ignore_eos(target):
        say(f"{target.name}: {target.address} does not take ignore_eos: outputs may end early")
        return replace(target, options=replace(target.options, ignore_eos=False))
    return target


def prompts_of(settings: LoadSettings, target: BenchTarget) -> Prompts:
    """Return what makes prompts from a seed; ``target`` shows how long words are."""
    count = _token_counter(settings.tokenizer) if settings.tokenizer is not None else None
    if settings.dataset_path is not None:
        found = read_prompts(settings.dataset_name, settings.dataset_path, count)

        def of_file(seed: str) -> Iterator[LoadPrompt]:
            return repeated(found, seed)

        return of_file
    lengths = Lengths(
        settings.input_len,
        settings.output_len or DEFAULT_OUTPUT_LEN,
        settings.range_ratio,
        settings.prefix_len,
        settings.num_prefixes,
    )
    make_text = text_maker(target, count)
    return lambda seed: random_prompts(lengths, make_text, seed)


def _token_counter(path: Path) -> CountTokens:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises a plain Exception.
    except Exception as error:
        raise ConfigError(f"--tokenizer: cannot read {file}: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class _Progress:
    """Says now and then how far a measurement is."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said_at = time.monotonic()

    def __call__(self, name: str, ended: int, total: int) -> None:
        now = time.monotonic()
        if (not total or ended < total) and now - self._said_at > PROGRESS_S:
            self._said_at = now
            self._say(f"{name}: {ended} of {total} requests" if total else f"{name}: {ended} requests")


def _line(row: Row) -> str:
    """Return one line about a measurement."""
    name = f"{row['server']}, {row['load']}, round {row['round'] + 1}"
    failed = f", {row['num_failed']} failed" if row["num_failed"] else ""
    if row["num_failed"] == row["num_sent"]:
        return f"{name}: all {row['num_sent']} requests failed"
    return (
        f"{name}: {row['num_sent']} requests{failed}, {row['tokens_per_s']:.0f} tok/s, "
        f"TTFT {row['ttft_p50_ms']:.1f} ms, TPOT {row['tpot_p50_ms']:.2f} ms"
    )


def _facts(settings: BenchSettings, targets: list[BenchTarget]) -> dict[str, Any]:
    hidden = {"url", "compare_url", "api_key", "compare_api_key"}
    return {
        "version": __version__,
        "began_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "servers": [{"name": each.name, "url": str(each.address), "model": each.model} for each in targets],
        "settings": settings.model_dump(mode="json", exclude=hidden),
    }


def _text(rows: list[Row], names: list[str]) -> str:
    parts = []
    # 80 where the output is no terminal: people read files in one.
    width = shutil.get_terminal_size().columns
    if report.measured(rows):
        parts = [report.to_table(rows, width), report.to_details(rows)]
    if found := report.ratios(rows, names):
        parts.append(report.to_ratios(found, names, width))
    return "\n\n".join(part for part in parts if part) + "\n"
