"""Define ``foretoken tune``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from foretoken.commands.client_commands import program, say
from foretoken.commands.given import Given
from foretoken.commands.serve_command import ServeCommand

if TYPE_CHECKING:
    from foretoken.bench.client import Address
    from foretoken.commands.options import TuneOptions
    from foretoken.commands.tuning import Trial
    from foretoken.tune.run import TuneOutcome

# The status of a program that Ctrl-C ended.
INTERRUPTED = 130


@click.command(cls=ServeCommand)
def tune(given: Given) -> None:
    """Find the settings with which this machine makes the most
    tokens a second, and write them to a file.

    One server is started for MODEL; each request asks for what is tried: plain decode, the server's
    own choice, each drafter in several shapes. The slower half is dropped again and again. It takes
    the flags of serve too, and writes them with what it has found, for foretoken serve --config.
    Ctrl-C ends it with what is known.
    """
    from foretoken.commands import config_file, tuning
    from foretoken.commands.options import TuneOptions
    from foretoken.tune import run, server
    from foretoken.tune.tuner import plan_of

    options = given.settings(TuneOptions)
    tuning.check_options(given, options)
    trial: tuning.Trial | None = None
    notices = given.notices
    if options.url is None:
        trial, more = tuning.trial_of(given, options)
        notices += more
        # A drafter that is not there, or too small a budget, is refused before a server is started.
        plan_of(options, run.candidates_of(options, trial.drafters))
    for line in notices:
        say(line)
    with _server(given, options, trial) as address:
        drafters = tuning.drafters_of(server.attached_drafters(address))
        outcome = run.run(options, address, run.candidates_of(options, drafters), say)
    values = tuning.config_of(given, outcome.choice, trial)
    config_file.write_config(options.write_config, "--write-config", _comments(outcome, trial), values)
    print(outcome.table, "", *outcome.lines, sep="\n")
    model = "" if trial is not None else " MODEL"
    print(f"serve it with: {program()} serve{model} --config {shlex.quote(str(options.write_config))}")
    if outcome.findings.is_interrupted:
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def _server(given: Given, options: TuneOptions, trial: Trial | None) -> Iterator[Address]:
    """Yield the address of the server to measure, which runs already or is started."""
    from pydantic import SecretStr

    from foretoken.bench.run import address_of
    from foretoken.tune.server import running_server

    if trial is None:
        assert options.url is not None
        keys = given.values.get("api_keys", ())
        yield address_of(options.url, SecretStr(" ".join(keys)), "")
        return
    say(f"starting a server for {options.model}")
    with running_server(trial.words) as address:
        yield address


def _comments(outcome: TuneOutcome, trial: Trial | None) -> Iterator[str]:
    """Yield what the config file says in comments."""
    yield f"Written by foretoken tune {outcome.facts['version']}, {outcome.facts['began_at']}."
    yield from outcome.lines
    if trial is None:
        names = ", ".join(outcome.choice.candidate.drafters)
        yield "The server ran already: give MODEL" + (f", and the drafter {names} alone." if names else ".")
    else:
        yield "Secrets, such as --api-key, are not in this file."
