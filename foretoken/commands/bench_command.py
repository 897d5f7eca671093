"""Define ``foretoken bench``."""

from __future__ import annotations

import sys

import click

from foretoken.commands.client_commands import say
from foretoken.commands.given import Given
from foretoken.commands.settings_command import SettingsCommand


@click.command(cls=SettingsCommand)
def bench(given: Given) -> None:
    """Load an OpenAI-compatible server and measure it, or compare two.

    The exit status is 1 if a request failed. The number of tokens comes from the answers' usage;
    chunks are never counted as tokens. The environment variable SSL_CERT_FILE names roots to check
    an https server by.
    """
    from foretoken.bench.run import run
    from foretoken.bench.settings import BenchSettings

    settings = given.settings(BenchSettings)
    outcome = run(settings, say)
    print(outcome.text, end="")
    for line in outcome.failures:
        say(line)
    if outcome.failures and not settings.allow_failures:
        sys.exit(1)
