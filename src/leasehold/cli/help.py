"""Help that serves as a manual: examples and exit codes below the options.

click re-wraps paragraphs; the `examples` of a command are printed line by line, as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import GLOBAL_OPTIONS, Console, use_color
from leasehold.cli.run.signals import held_back
from leasehold.config import did_you_mean

WIDTH = 100

# Words of other programs for our commands. click would suggest the command with the most similar letters.
_OTHER_WORDS: Final = {
    "lock": ("run", "acquire"),
    "exec": ("run",),
    "unlock": ("release", "break"),
    "free": ("release", "break"),
    "extend": ("renew",),
    "refresh": ("renew",),
    "list": ("ls",),
    "status": ("ls", "get"),
    "show": ("get",),
    "kill": ("break",),
    "steal": ("break",),
    "server": ("serve",),
    "check": ("doctor",),
    "help": ("--help",),
    "version": ("--version",),
}


def global_options(*, for_command: bool) -> list[click.Option]:
    """For the program: shown in its help, and read from the environment. For a command: hidden, with precedence."""
    own: dict[str, Any] = {"expose_value": False, "callback": _store_option, "show_envvar": True}
    if for_command:
        own |= {"hidden": True, "envvar": None}
    return [click.Option(option.flags, **option.click_settings() | own) for option in GLOBAL_OPTIONS]


def _store_option(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store it in the console of this context. A command's context inherits the program's console."""
    console = (ctx.find_object(Console) or Console()).with_option(str(param.name), value)
    ctx.obj, ctx.color = console, use_color()
    console.prepare_logs()


class Command(click.Command):
    """A command with examples. `codes` are its possible exit codes other than 0, 64 and, if it `prints` data, 74. One
    that talks to an engine (69) may also end with 77. `is_program`: not a command, but the program itself.
    """

    other_codes: ClassVar[Sequence[tuple[str, str]]] = ()  # rows below the table of exit codes

    def __init__(
        self,
        *args: Any,
        examples: str = "",
        codes: Iterable[int] = (),
        prints: bool = True,
        is_program: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._is_program = is_program
        self.params = [*global_options(for_command=not is_program), *self.params]
        self.examples = examples.strip("\n")
        possible = {exit_codes.OK, exit_codes.USAGE, *codes}
        if prints:
            possible.add(exit_codes.OUTPUT)
        if exit_codes.UNREACHABLE in possible:
            possible.add(exit_codes.NOT_PERMITTED)
        self.codes = sorted(possible)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out if the value of an option is missing
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._is_program:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(
                    "The global options (-u, --namespace, -o, -q, -v; see `leasehold --help`) work here, too."
                )
        write_examples(formatter, self.examples)
        write_codes(formatter, self.codes, self.other_codes, " ".join(ctx.command_path.split()[1:]))


def command(
    name: str, examples: str, *codes: int, short_help: str | None = None, cls: type[Command] = Command
) -> Callable[[Callable[..., Any]], Command]:
    """Makes a function a command of the program. `short_help`: its line in the list of commands, if that is not the
    first sentence of its docstring."""
    return click.command(name, cls=cls, short_help=short_help, examples=examples, codes=codes)


class Group(Command, click.Group):
    """The program itself, or a command that has commands. Commands are listed by usefulness, not alphabetically."""

    command_class = Command

    def __init__(self, *args: Any, lazy_commands: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        """`lazy_commands`: names of commands -> "module:attribute"."""
        super().__init__(*args, **kwargs)
        self._lazy_commands = lazy_commands or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy_commands, *(name for name in self.commands if name not in self._lazy_commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self._lazy_commands:
            module, _, attribute = self._lazy_commands[cmd_name].partition(":")
            with held_back():
                self.commands[cmd_name] = getattr(import_module(module), attribute)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ours = _OTHER_WORDS.get(args[0]) if self._is_program else None
        if ours and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}: see " + " or ".join(f"`leasehold {word}`" for word in ours))
        if not ctx.resilient_parsing and args[0][:1] != "-" and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


def write_examples(formatter: click.HelpFormatter, examples: str) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in examples.splitlines():
                formatter.write(f"  {line}".rstrip() + "\n")


def write_codes(
    formatter: click.HelpFormatter, codes: Sequence[int], other: Sequence[tuple[str, str]], command: str
) -> None:
    """`command`: the words after `leasehold`; none for the program itself."""
    rows = [("128+n" if code == exit_codes.SIGNALLED else str(code), _meaning(code, command)) for code in codes]
    with formatter.section("Exit codes"):
        formatter.write_dl(
            sorted([*rows, *other], key=lambda row: int(row[0]) if row[0].isdigit() else exit_codes.SIGNALLED)
        )


def _meaning(code: int, command: str) -> str:
    """What an exit code means, without what it means only for other commands: "`demo`: ..."."""
    parts = exit_codes.MEANING[code].removeprefix("128+n: ").split("; ")
    kept = [part for part in parts if part.startswith(f"`{command}") or not (command and part.startswith("`"))]
    return "; ".join(part.removeprefix(f"`{command}`: ") for part in kept)
