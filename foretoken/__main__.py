"""Run the command line as a module, so that ``ps`` shows ``foretoken gateway``."""

from foretoken.cli import main

main()
