"""`leasehold schema`: what an engine in a database keeps there, as statements for a migration tool."""

from __future__ import annotations

from importlib import import_module

import click

from leasehold import engines
from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Command
from leasehold.errors import ConfigError

EXAMPLES = """
leasehold schema postgresql | psql -1 "$DATABASE_URL"    make or upgrade it
leasehold schema postgresql --role app > 007_locks.sql   with rights for app
leasehold schema postgresql --schema locks               as in ?schema=locks
leasehold schema mysql --schema shop | mysql             as in mysql://host/shop
leasehold schema mysql --role app@10.%                   an account, and from where
"""


@click.command("schema", cls=Command, examples=EXAMPLES, codes=(exit_codes.CONFIG,))
@click.argument("engine", type=click.Choice(["mysql", "postgresql"]))
@click.option(
    "--schema",
    "name",
    metavar="NAME",
    default="leasehold",
    help="The schema, or in MySQL the database. Default: leasehold.",
)
@click.option("--role", metavar="ROLE", help="Also grant ROLE what a client needs, and no more.")
@click.option(
    "--no-operator", is_flag=True, help="With --role: do not let ROLE look at the locks of others or break them."
)
@pass_console
def schema(console: Console, engine: str, name: str, role: str | None, no_operator: bool) -> None:
    """Print the tables and functions, or procedures, of an engine.

    A client makes them by itself on first use if its role may. Where it may not, run these statements as the owner
    of the database. They can be run again at any time, also while clients are at work: what is there is kept, and
    what is newer is added beside it.

    The functions run with the rights of whoever makes them. A role that uses locks needs to execute them, and no
    right to any table: --role prints those grants. In MySQL the role is an account. Connects to nothing.
    """
    engines.opener(engine)  # says what to install, if its driver is missing
    module = import_module(f"leasehold.engines.{engine}.schema")
    try:
        console.put(module.text(module.validate_name(name)).rstrip("\n"))
        if role is not None:
            console.put("\n" + module.grants(role, name, operator=not no_operator).rstrip("\n"))
    except ValueError as bad:
        raise ConfigError(str(bad)) from None
