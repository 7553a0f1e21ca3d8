"""`leasehold schema`: the tables and functions of an SQL engine, as statements for a migration tool."""

from __future__ import annotations

from importlib import import_module

import click

from leasehold import engines
from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.errors import ConfigError

EXAMPLES = """
leasehold schema postgresql | psql -1 "$DATABASE_URL"    create or upgrade the schema
leasehold schema postgresql --role app > 007_locks.sql   with grants for the role app
leasehold schema postgresql --schema locks               for URLs with ?schema=locks
leasehold schema mysql --schema shop | mysql             for mysql://host/shop
leasehold schema mysql --role app@10.%                   with grants for an account
"""


@command("schema", EXAMPLES, exit_codes.CONFIG, short_help="Print the SQL of an engine's tables and functions.")
@click.argument("engine", type=click.Choice(["mysql", "postgresql"]))
@click.option(
    "--schema",
    "name",
    metavar="NAME",
    default="leasehold",
    help="Name of the schema; in MySQL, of the database. Default: leasehold.",
)
@click.option("--role", metavar="ROLE", help="Also print grants that give ROLE what a client needs, and no more.")
@click.option(
    "--no-operator",
    is_flag=True,
    help="With --role: do not allow ROLE to list all locks, to break them or to resize them.",
)
@pass_console
def schema(console: Console, engine: str, name: str, role: str | None, no_operator: bool) -> None:
    """Print the SQL that creates the tables and functions of an engine.

    A client creates them automatically on first use if its role is allowed to. If it is not, run these statements as
    the owner of the database. You can run them again at any time, even while clients are working: they keep what
    exists, and add newer versions next to it.

    The functions run with the privileges of the role that creates them. A role that uses locks needs the privilege to
    execute them, and none on the tables: --role prints those grants. In MySQL the functions are procedures, and ROLE
    is an account. This command does not connect to the database.
    """
    engines.opener(engine)  # raises an error that says what to install if the driver is missing
    module = import_module(f"leasehold.engines.{engine}.schema")
    try:
        console.put(module.text(module.validate_name(name)).rstrip("\n"))
        if role is not None:
            console.put("\n" + module.grants(role, name, operator=not no_operator).rstrip("\n"))
    except ValueError as bad:
        raise ConfigError(str(bad)) from None
