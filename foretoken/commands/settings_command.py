"""Build commands whose flags are the fields of settings classes."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from foretoken.commands.given import Given
from foretoken.commands.subjects import SUBJECTS, place_of

if TYPE_CHECKING:
    from foretoken.config import Setting

# vLLM flags whose equivalent here has an unrelated name.
VLLM_NAMES = {
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enforce-eager": "--disable-cuda-graph",
}
# Flags of vLLM's that have no single equivalent, and what to say of them.
_VLLM_ANSWERS = {
    "--speculative-config": "is vLLM's; here it is --speculative-algorithm, --speculative-draft-model-path and others",
    "--enable-prefix-caching": "is vLLM's; here the prefix cache is on unless --disable-radix-cache is given",
}
_NEGATIONS = ("--no-", "--disable-")
_TYPES: dict[Any, click.ParamType[Any, Any]] = {int: click.INT, float: click.FLOAT, bool: click.BOOL}


class SettingsCommand(click.Command):
    """A command that calls its function with a ``Given``.

    It imports the settings classes only when it is used, so that ``foretoken --help`` stays fast.
    """

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The command's settings, by parameter name."""
        from foretoken.commands.options import settings_of_command

        return {"__".join(setting.path): setting for setting in settings_of_command(str(self.name))}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            self.params = [_parameter(name, setting) for name, setting in self.settings.items()]
            self.params.append(
                click.Option(
                    ["--config"],
                    metavar="FILE",
                    is_eager=True,
                    expose_value=False,
                    callback=self._read_file,
                    help="YAML or TOML file of settings: names of flags without dashes; flags and environment win.",
                )
            )
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under a heading for each subject."""
        rows: dict[str, list[tuple[int, tuple[str, str]]]] = {subject: [] for subject in SUBJECTS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                subject, place = place_of(option.opts[0])
                rows[subject].append((place, record))
        for subject, found in rows.items():
            if found:
                with formatter.section(subject):
                    formatter.write_dl([record for _, record in sorted(found, key=lambda row: row[0])])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags.

        Raises ConfigError for vLLM's name of one, and UsageError that suggests a similar name for
        an unknown one.
        """
        own = {flag for option in self.get_params(ctx) for flag in option.opts}
        theirs = {name: ours for name, ours in VLLM_NAMES.items() if ours in own}
        answers = {name: f"is vLLM's name; here it is {ours}" for name, ours in theirs.items()}
        if "--disable-radix-cache" in own:
            answers |= _VLLM_ANSWERS
        for name in (arg.partition("=")[0] for arg in args):
            if name in answers:
                from foretoken.errors import ConfigError

                raise ConfigError(f"{name} {answers[name]}")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from foretoken.spelling import nearest

            # Of two names that differ by a negation, one means the opposite of the other.
            is_negated = error.option_name.startswith(_NEGATIONS)
            near = nearest(
                error.option_name, (name for name in own | theirs.keys() if name.startswith(_NEGATIONS) == is_negated)
            )
            hint = f" Did you mean {theirs.get(near, near)!r}?" if near is not None else ""
            raise click.UsageError(f"No such option {error.option_name!r}.{hint}", ctx) from error

    def given(self, ctx: click.Context) -> Given:
        """Return the user's values from a parsed context."""
        values: dict[str, Any] = {}
        for name, setting in self.settings.items():
            if setting.shown.secret and setting.shown.env:
                # Not for the environment of every child process.
                os.environ.pop(setting.shown.env, None)
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
                *outer, last = setting.path
                (values.setdefault(outer[0], {}) if outer else values)[last] = ctx.params[name]
        return Given(values)

    def invoke(self, ctx: click.Context) -> Any:
        assert self.callback is not None
        return ctx.invoke(self.callback, self.given(ctx))

    def _read_file(self, ctx: click.Context, _: click.Parameter, file: str | None) -> None:
        if file is None:
            return
        from foretoken.commands.config_file import read_config
        from foretoken.errors import ConfigError
        from foretoken.spelling import did_you_mean

        names = {setting.key: name for name, setting in self.settings.items()}
        ctx.default_map = dict(ctx.default_map or {})
        for key, value in read_config(Path(file)).items():
            if key not in names:
                raise ConfigError(f"--config: {file}: there is no setting {key!r}{did_you_mean(key, names)}")
            is_repeated = self.settings[names[key]].is_repeated
            if isinstance(value, str) and self.settings[names[key]].shown.one_or_many:
                value = [value]
            if isinstance(value, list) != is_repeated:
                raise ConfigError(f"--config: {file}: {key}: expected {'a list' if is_repeated else 'one value'}")
            ctx.default_map[names[key]] = value


class _Capitals(click.Choice[str]):
    """Accepts names in capitals in any case."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value.upper() if value.upper() in self.choices else value, param, ctx)


class _NumberOrWord(click.types.IntParamType):
    """A whole number, or a word that stands for 0."""

    def __init__(self, word: str) -> None:
        self._word = word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return 0 if value == self._word else super().convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"INTEGER|{self._word}"


def _parameter(name: str, setting: Setting) -> click.Parameter:
    shown, kind = setting.shown, setting.type
    kind_of_value: click.ParamType[Any, Any] = _TYPES.get(kind, click.STRING)
    if shown.choices:
        kind_of_value = _Capitals(shown.choices)
    elif get_origin(kind) is Literal:
        kind_of_value = click.Choice(get_args(kind))
    elif shown.zero:
        kind_of_value = _NumberOrWord(shown.zero)
    text = setting.field.description
    if setting.is_argument:
        metavar = setting.flag if setting.is_required else f"[{setting.flag}]"
        return click.Argument([name], metavar=metavar, required=setting.is_required, help=text)
    has_default = setting.default is not None and setting.default is not False and not setting.is_repeated
    # None would be a value for click: such an option could not be missing.
    default = {} if setting.default is None else {"default": setting.default}
    return click.Option(
        [setting.flag, name],
        type=kind_of_value,
        metavar=shown.metavar,
        is_flag=kind is bool,
        multiple=setting.is_repeated,
        required=setting.is_required,
        show_default=shown.unset or has_default,
        envvar=shown.env,
        show_envvar=shown.env is not None,
        hidden=shown.hidden,
        help=text,
        **default,
    )
