"""``foretoken corpus``: the operator's commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foretoken.corpus_client import CorpusClient

app = typer.Typer(help="Texts that n-gram drafters draft from, changed while the server runs.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the corpus.")]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Text files, or folders of them.")]
Append = Annotated[bool, typer.Option("--append", help="Keep what the corpus holds already.")]
Url = Annotated[str, typer.Option(envvar="FORETOKEN_URL", show_envvar=True, help="Where the gateway answers.")]
KeyFile = Annotated[
    Path,
    typer.Option("--admin-api-key-file", envvar="FORETOKEN_ADMIN_API_KEY_FILE", help="The operator's key."),
]
DrafterName = Annotated[str, typer.Option("--drafter", help="Name of a drafter.", show_default="the first")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def add(
    name: Name,
    paths: Paths,
    key_file: KeyFile,
    url: Url = DEFAULT_URL,
    drafter: DrafterName = "",
    append: Append = False,
) -> None:
    """Draft from files from now on."""
    from foretoken.corpus_client import texts_of
    from foretoken.errors import ConfigError

    with _client(url, key_file, drafter) as client:
        info = client.add(name, texts_of(paths), append=append)
    if info is None:
        raise ConfigError("there is no text in these files")
    print(f"{info.name}: {info.num_tokens} tokens")


@app.command("list")
def list_corpora(key_file: KeyFile, url: Url = DEFAULT_URL, drafter: DrafterName = "") -> None:
    """Names and tokens of all corpora."""
    with _client(url, key_file, drafter) as client:
        for info in client.list():
            print(f"{info.name}: {info.num_tokens} tokens")


@app.command()
def remove(name: Name, key_file: KeyFile, url: Url = DEFAULT_URL, drafter: DrafterName = "") -> None:
    """Draft from a corpus no more."""
    with _client(url, key_file, drafter) as client:
        client.remove(name)


def _client(url: str, key_file: Path, drafter: str) -> CorpusClient:
    from foretoken.corpus_client import CorpusClient
    from foretoken.errors import ConfigError

    try:
        key = key_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-api-key-file: cannot read {key_file}: {error}") from None
    return CorpusClient(url, key, drafter)
