"""Define the operator's commands for corpora: ``foretoken corpus``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from foretoken.commands.client_commands import operator_key_option, url_option

if TYPE_CHECKING:
    from foretoken.commands.corpus_client import CorpusClient, CorpusOf

name_argument = click.argument("name", metavar="NAME", help="Name of the corpus.")
drafter_option = click.option("--drafter", default="", show_default="the first", help="Name of a drafter.")


@click.group("corpus")
def app() -> None:
    """Change the texts that n-gram drafters draft from."""


@app.command()
@name_argument
@click.argument(
    "paths",
    metavar="PATH...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    help="Text files, or folders of text files.",
)
@operator_key_option
@url_option
@drafter_option
@click.option("--append", is_flag=True, help="Keep the corpus' present texts.")
def add(name: str, paths: tuple[Path, ...], key_file: Path, url: str, drafter: str, append: bool) -> None:
    """Draft from files from now on."""
    from foretoken.commands.corpus_client import texts_of
    from foretoken.errors import ConfigError

    with _client(url, key_file, drafter) as client:
        info = client.add(name, texts_of(paths), append=append)
    if info is None:
        raise ConfigError("there is no text in these files")
    _show(info)


@app.command("list")
@operator_key_option
@url_option
@click.option("--drafter", default="", show_default="all", help="Name of a drafter.")
def list_corpora(key_file: Path, url: str, drafter: str) -> None:
    """List all corpora with their tokens and drafters."""
    with _client(url, key_file, drafter) as client:
        found = client.list()
        for info in found:
            _show(info)
        if not found:
            print("no corpora")


@app.command()
@name_argument
@operator_key_option
@url_option
@drafter_option
def remove(name: str, key_file: Path, url: str, drafter: str) -> None:
    """Remove a corpus."""
    with _client(url, key_file, drafter) as client:
        client.remove(name)
    print(f"{name}: removed")


def _show(corpus: CorpusOf) -> None:
    print(f"{corpus.name}: {corpus.num_tokens} tokens, drafter {corpus.drafter}")


def _client(url: str, key_file: Path, drafter: str) -> CorpusClient:
    from foretoken.commands.corpus_client import CorpusClient
    from foretoken.operator_key import read_operator_key

    return CorpusClient(url, read_operator_key(key_file), drafter)
