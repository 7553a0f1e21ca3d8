"""`leasehold serve`: the lock server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console, write_stderr
from leasehold.cli.help import Group
from leasehold.cli.serve_key import key
from leasehold.errors import ConfigError
from leasehold.server.settings import CONFIG_VARIABLE, SETTINGS, Setting, read

EXAMPLES = """
leasehold serve                                 a SQLite file in your state directory
curl -d '{"name": "orders/42", "ttl": 30}' localhost:7420/v1/acquire
leasehold serve --config serve.toml --check
leasehold -u redis://10.0.0.5 serve --listen 0.0.0.0:7420 --keys keys.toml
"""


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for each setting but the engine, which is `-u`."""
    for setting in reversed(SETTINGS):
        if setting.key != "engine":
            command = _option(setting)(command)
    return command


def _option(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = setting.default
    text = setting.text
    if default not in (None, False, "", ()):
        shown = (
            ", ".join(default)
            if isinstance(default, tuple)
            else f"{default:g}"
            if isinstance(default, float)
            else default
        )
        text += f" Default: {shown}."
    settings: dict[str, Any] = {"help": text}
    if isinstance(default, bool):
        settings |= {"is_flag": True, "default": None}
    elif isinstance(default, tuple):
        settings |= {"multiple": True, "metavar": setting.metavar}
    else:
        settings |= {"metavar": setting.metavar}
    return click.option(setting.flag, setting.key, **settings)


@click.group(
    "serve",
    cls=Group,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND [ARGS]...]",
    examples=EXAMPLES,
    codes=(exit_codes.CONFIG,),
    prints=False,
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read settings from this TOML file. Flags and environment variables have precedence. "
    f"[env var: {CONFIG_VARIABLE}]",
)
@click.option("--check", is_flag=True, help="Check the settings, the key file and the certificates, and exit.")
@setting_options
@pass_console
@click.pass_context
def serve(ctx: click.Context, console: Console, /, config: Path | None, check: bool, **flags: Any) -> None:
    """Serve the engine's locks over HTTP.

    Programs in any language acquire locks with HTTP requests; Python programs use `http://HOST:PORT` as the URL of
    their engine. Any number of servers may serve the same engine: they keep no state of their own.

    Prints `listening on http://HOST:PORT` to stderr once it is ready. On SIGTERM it finishes the requests in progress,
    sends waiting callers to another server, and exits with 0. `leasehold docs server/tutorial` is a five-minute
    introduction with curl.

    Every flag has an environment variable: LEASEHOLD_SERVE_ and its name, such as LEASEHOLD_SERVE_TLS_CERT.
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = read(flags | {"engine": console.url if _is_given(ctx, "url") else None}, os.environ, config)
    try:
        from leasehold.server import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("leasehold"):
            raise
        hint = 'pip install "leasehold[server]"'
        raise ConfigError(f"serve needs {error.name}, which is not installed: {hint}") from error
    for warning in settings.warnings():
        console.say(f"warning: {warning}")
    if check:
        run.check(settings)
        console.say("the settings are valid")
        return
    run.serve(settings, write_stderr)


def _is_given(ctx: click.Context, name: str) -> bool:
    """Whether a global option was given on the command line: variables are weaker than LEASEHOLD_SERVE_*."""
    return any(each.get_parameter_source(name) is ParameterSource.COMMANDLINE for each in (ctx, ctx.find_root()))


serve.add_command(key)
