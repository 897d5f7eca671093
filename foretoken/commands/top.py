"""Show a running gateway's figures: ``foretoken top``."""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.live import Live

from foretoken.commands.gateway_reader import Answers, GatewayReader
from foretoken.errors import ForetokenError
from foretoken.top.figures import figures
from foretoken.top.picture import lost_picture, picture
from foretoken.top.window import Window

# Rates and percentiles are of these seconds, or of two intervals if they are longer.
WINDOW_S = 10.0


def show_once(gateway: GatewayReader, console: Console, interval_s: float) -> None:
    """Print one picture, of the next ``interval_s`` seconds.

    Raises the errors of ``GatewayReader.read``.
    """
    view = View(gateway, interval_s)
    view.read()
    time.sleep(interval_s)
    console.print(view.read())


def show_live(gateway: GatewayReader, console: Console, interval_s: float) -> None:
    """Show the figures until Ctrl-C.

    A gateway that no longer answers is asked again until it does. Raises the errors of
    ``GatewayReader.read`` if it does not answer at first.
    """
    view = View(gateway, interval_s)
    live = Live(view.read(), console=console, screen=True, auto_refresh=False)
    # Its own context manager would keep the terminal's screen if a signal came while it begins.
    try:
        live.start(refresh=True)
        while True:
            time.sleep(interval_s)
            live.update(view.read_or_say_why(), refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        live.stop()


class View:
    """What is seen of one gateway, reading after reading."""

    def __init__(self, gateway: GatewayReader, interval_s: float) -> None:
        self._gateway, self._interval_s = gateway, interval_s
        self._window = Window(max(WINDOW_S, 2 * interval_s))
        self._lost_at: float | None = None

    def read(self) -> RenderableType:
        """Read the gateway and return the picture."""
        answers = self._gateway.read()
        self._lost_at = None
        return self._picture(answers)

    def read_or_say_why(self) -> RenderableType:
        """Return the picture, or one that says since when the gateway does not answer, and why."""
        try:
            return self.read()
        except ForetokenError as error:
            self._lost_at = self._lost_at or time.time()
            return lost_picture(self._gateway.url, self._lost_at, error.message, self._interval_s)

    def _picture(self, answers: Answers) -> RenderableType:
        self._window.add(answers.reading)
        return picture(self._gateway.url, figures(self._window), answers.ready, answers.activity)
