"""Write the manual pages, one per command, from the help that the commands print: `make man`, or any build.

python tools/man.py FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))  # before a package that happens to be installed

import click  # noqa: E402

from leasehold import __version__  # noqa: E402
from leasehold.cli.program import leasehold  # noqa: E402


def escaped(text: str) -> str:
    """For troff: no backslash, hyphen, quote or leading dot of ours means anything to it. `code` becomes bold."""
    text = (
        text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("^", r"\(ha").replace("~", r"\(ti")
    )
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fP", text).replace("`", r"\(ga")
    return re.sub(r"(?m)^\.", r"\\&.", text)


class ManFormatter(click.HelpFormatter):
    """Takes what click writes for a terminal, and writes it as a manual page."""

    def __init__(self) -> None:
        super().__init__(width=10_000)  # short texts are not cut

    def add(self, *lines: str) -> None:
        self.buffer += [f"{line}\n" for line in lines]

    def write(self, string: str) -> None:
        """Examples are written like this, line by line."""
        self.add(".nf", escaped(string.strip("\n").removeprefix("  ")) or ".sp", ".fi")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.add(".SH SYNOPSIS", rf"\fB{escaped(prog)}\fP {escaped(args)}", ".SH DESCRIPTION")

    def write_paragraph(self) -> None:
        pass  # write_text begins each

    def write_text(self, text: str) -> None:
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            self.add(".PP", escaped(" ".join(paragraph.split())))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for term, text in rows:
            self.add(".TP", rf"\fB{escaped(term)}\fP", escaped(" ".join(text.split())))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.add(f".SH {name.upper()}")
        yield

    @contextmanager
    def indentation(self) -> Iterator[None]:
        yield


def page(ctx: click.Context) -> str:
    name = ctx.command_path.replace(" ", "-")
    made = ManFormatter()
    made.add(
        f'.TH {name.upper()} 1 "" "Leasehold {__version__}" "Leasehold"',  # without a date: the same from every build
        ".SH NAME",
        rf"{escaped(name)} \- {escaped(ctx.command.get_short_help_str(10_000).rstrip('.'))}",
    )
    ctx.command.format_help(ctx, made)
    related = [ctx.parent.command_path.replace(" ", "-")] if ctx.parent else []
    related += [f"{name}-{each}" for each in sorted(commands(ctx))]
    made.add(".SH SEE ALSO", ", ".join(rf"\fB{escaped(each)}\fP(1)" for each in related))
    made.add(".PP", escaped("`leasehold docs` prints the documentation."))
    return made.getvalue()


def commands(ctx: click.Context) -> list[str]:
    return ctx.command.list_commands(ctx) if isinstance(ctx.command, click.Group) else []


def contexts(ctx: click.Context) -> Iterator[click.Context]:
    """This one, and those of all commands below it."""
    yield ctx
    if isinstance(ctx.command, click.Group):
        for name in commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert command is not None
            yield from contexts(click.Context(command, info_name=name, parent=ctx))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for ctx in contexts(click.Context(leasehold, info_name="leasehold", **leasehold.context_settings)):
        Path(folder, ctx.command_path.replace(" ", "-") + ".1").write_text(page(ctx), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
