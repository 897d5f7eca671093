"""The command line of ``foretoken serve``: our flags, and SGLang's as typed."""

from __future__ import annotations

from dataclasses import replace

import click

from foretoken.commands.given import Given
from foretoken.commands.settings_command import SettingsCommand

_NOTICES = f"{__name__}.notices"


class ServeCommand(SettingsCommand):
    """A command that takes SGLang's flags too, and keeps what is to be said about them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from foretoken.commands.sglang_words import translate

        own = {name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("--")}
        args, ctx.meta[_NOTICES] = translate(args, own)
        return super().parse_args(ctx, args)

    def given(self, ctx: click.Context) -> Given:
        return replace(super().given(ctx), notices=tuple(ctx.meta[_NOTICES]))
