"""``foretoken corpus``: the operator's commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken import flags

if TYPE_CHECKING:
    from foretoken.commands.corpus_client import CorpusClient, CorpusOf

app = typer.Typer(help="Texts that n-gram drafters draft from, changed while the server runs.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the corpus.")]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Text files, or folders of them.")]
Append = Annotated[bool, typer.Option("--append", help="Keep what the corpus holds already.")]
DrafterName = Annotated[str, typer.Option("--drafter", help="Name of a drafter.", show_default="the first")]
OneDrafter = Annotated[str, typer.Option("--drafter", help="Name of a drafter.", show_default="all")]


@app.command()
def add(
    name: Name,
    paths: Paths,
    key_file: flags.OperatorKeyFile,
    url: flags.Url = flags.DEFAULT_URL,
    drafter: DrafterName = "",
    append: Append = False,
) -> None:
    """Draft from files from now on."""
    from foretoken.commands.corpus_client import texts_of
    from foretoken.errors import ConfigError

    with _client(url, key_file, drafter) as client:
        info = client.add(name, texts_of(paths), append=append)
    if info is None:
        raise ConfigError("there is no text in these files")
    _show(info)


@app.command("list")
def list_corpora(key_file: flags.OperatorKeyFile, url: flags.Url = flags.DEFAULT_URL, drafter: OneDrafter = "") -> None:
    """Names and tokens of all corpora, and whose they are."""
    with _client(url, key_file, drafter) as client:
        for info in client.list():
            _show(info)


@app.command()
def remove(
    name: Name, key_file: flags.OperatorKeyFile, url: flags.Url = flags.DEFAULT_URL, drafter: DrafterName = ""
) -> None:
    """Draft from a corpus no more."""
    with _client(url, key_file, drafter) as client:
        client.remove(name)


def _show(corpus: CorpusOf) -> None:
    print(f"{corpus.name}: {corpus.num_tokens} tokens, drafter {corpus.drafter}")


def _client(url: str, key_file: Path, drafter: str) -> CorpusClient:
    from foretoken.commands.corpus_client import CorpusClient
    from foretoken.commands.operator_client import read_key

    return CorpusClient(url, read_key(key_file), drafter)
