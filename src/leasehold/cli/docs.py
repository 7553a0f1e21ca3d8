"""`leasehold docs`: the documentation, which is part of the wheel, for people without the repository."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command

EXAMPLES = """
leasehold docs                          list the pages
leasehold docs tutorial | less
leasehold docs reference/json           what `-o json` prints
"""

_PACKAGE = Path(__file__).parents[1]
# In the wheel beside the package's modules, in the repository above src/.
FOLDER = next((path for path in (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs") if path.is_dir()), _PACKAGE / "docs")


def page_names() -> list[str]:
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.md"))


@command("docs", EXAMPLES)
@click.argument("page", required=False)
@pass_console
def docs(console: Console, page: str | None) -> None:
    """Print a page of the documentation, or list the pages.

    The pages are part of the installed package, so this works offline. They are Markdown. Begin with `tutorial`, or
    with `how-to/cron-job-once`. In the repository, PAGE is docs/PAGE.md.
    """
    names = page_names()
    if page is None:
        for name in names:
            console.put(f"{name:<36} {title(name)}")
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in names:
        similar = [known for known in names if name in known] or difflib.get_close_matches(name, names, 1, 0.4)
        hint = f"did you mean {' or '.join(map(repr, similar[:3]))}? " if similar else ""
        raise click.UsageError(f"there is no page {page!r}: {hint}`leasehold docs` lists the pages")
    console.put((FOLDER / f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))


def title(name: str) -> str:
    with open(FOLDER / f"{name}.md", encoding="utf-8") as file:
        return next((line[2:].strip() for line in file if line.startswith("# ")), "")
