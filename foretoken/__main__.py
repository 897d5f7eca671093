"""``python -m foretoken``: how the supervisor starts services, so that `ps` shows ``foretoken gateway``."""

from foretoken.cli import main

main()
