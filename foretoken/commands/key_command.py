"""Define ``foretoken key``, which makes an API key."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("name", metavar="NAME", help="The tenant's name in logs and metrics: a-z, 0-9, _, . and -.")
@click.option("--requests-per-minute", type=int, show_default="any", help="Requests that may start in a minute.")
@click.option("--tokens-per-minute", type=int, show_default="any", help="Prompt and output tokens in a minute.")
@click.option("--max-concurrent-requests", type=int, show_default="any", help="Requests at once.")
@click.option("--model", "models", multiple=True, show_default="all", help="A model that it may use; repeatable.")
@click.option("--priority", type=int, show_default="0", help="Added to its requests' priority; lower ones start first.")
@click.option("--metrics", is_flag=True, help="Let it read /metrics, where all tenants' names stand.")
def key(
    name: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent_requests: int | None,
    models: tuple[str, ...],
    priority: int | None,
    metrics: bool,
) -> None:
    """Make an API key for --api-key-file.

    The key goes to stderr, once: nobody can read it from its hash. The hash goes to stdout, as an
    entry of the file: foretoken key alice >> keys.toml
    """
    from gateway.access.key import new_secret
    from gateway.access.key_file import entry_text

    secret = new_secret()
    entry = entry_text(
        name,
        secret,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent_requests=max_concurrent_requests,
        models=list(models),
        priority=priority,
        metrics=metrics,
    )
    print(f"the key of {name}: {secret}", file=sys.stderr, flush=True)
    print(entry, flush=True)
