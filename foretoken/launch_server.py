"""Run ``foretoken serve`` by SGLang's command: ``python -m foretoken.launch_server``.

Its REST port is SGLang's, 30000, unless a flag or a config file names another.
"""

from __future__ import annotations

from foretoken import cli

PORT = "30000"


def main() -> None:
    cli.main(cli.serve, "python -m foretoken.launch_server", {"port": PORT})


if __name__ == "__main__":
    main()
