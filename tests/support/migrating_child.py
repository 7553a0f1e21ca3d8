"""A project of Alembic, and a program that upgrades it in many processes at once: forks, because imports take long.

    python migrating_child.py FOLDER DATABASE_URL LOCK_URL COUNT TTL

The lock has this ttl; 0: no lock. The second revision waits for ever, once, if FOLDER/hang exists. The program prints
the exit codes of its forks.
"""

import os
import sys
from pathlib import Path

from alembic import command
from alembic.config import Config

ENV = """
from contextlib import nullcontext
from alembic import context
from sqlalchemy import create_engine, pool
from leasehold.integrations.alembic import locked

def run_migrations_online():
    engine = create_engine(context.config.get_main_option("sqlalchemy.url"), poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()

ttl = context.config.attributes["ttl"]
with locked(context, ttl=ttl) if ttl else nullcontext():
    run_migrations_online()
"""

REVISION = """
import os, time
from alembic import op

revision, down_revision = {revision!r}, {previous!r}

def upgrade():
    folder = {folder!r}
    with open(folder + "/log", "a") as log:
        log.write({revision!r} + " " + str(os.getpid()) + "\\n")
    if {revision!r} == "second" and os.path.exists(folder + "/hang"):
        os.unlink(folder + "/hang")
        time.sleep(3600)
    time.sleep(0.1)
    op.execute("create table {revision} (id integer)")
"""


def write_project(folder: Path) -> None:
    versions = folder / "migrations" / "versions"
    versions.mkdir(parents=True)
    (folder / "migrations" / "env.py").write_text(ENV)
    for revision, previous in (("first", None), ("second", "first")):
        text = REVISION.format(revision=revision, previous=previous, folder=str(folder))
        (versions / f"{revision}.py").write_text(text)


def upgrade(folder: Path, database: str, lock: str, ttl: float) -> None:
    config = Config()
    config.set_main_option("script_location", str(folder / "migrations"))
    config.set_main_option("sqlalchemy.url", database.replace("%", "%%"))
    if lock:
        config.set_main_option("leasehold.url", lock.replace("%", "%%"))
    config.attributes["ttl"] = ttl
    command.upgrade(config, "head")


def main() -> None:
    folder, database, lock, count, ttl = sys.argv[1:]
    pids = []
    for _ in range(int(count)):
        pid = os.fork()
        if pid == 0:
            try:
                upgrade(Path(folder), database, lock, float(ttl))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
