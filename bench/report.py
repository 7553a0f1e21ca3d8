"""Run every table, one after the other, and write `bench/RESULTS.md`: `python -m bench.report [TABLE ...]`.

Each table runs in a process of its own, as it would by hand. The page says on which machine and with which versions,
and keeps what was printed as it was.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

TABLES: Final = ("memory", "sqlite", "redis", "loop", "redlock", "postgresql", "mysql", "etcd", "zookeeper", "imports")
PAGE: Final = Path(__file__).with_name("RESULTS.md")
LONGEST: Final = 900.0  # seconds of one table

PACKAGES: Final = (
    *("redis", "hiredis", "kazoo", "psycopg", "pymysql", "filelock", "python-redis-lock", "pottery", "redlock-py"),
    *("sherlock", "tooz", "aetcd", "etcd3gw", "etcd-client-py", "pals"),
)
SERVERS: Final = {
    "Redis": ["redis-server", "--version"],
    "etcd": ["etcd", "--version"],
    "PostgreSQL": ["/usr/lib/postgresql/15/bin/postgres", "--version"],
    "MariaDB": ["mariadbd", "--version"],
}

READING: Final = """\
How to read it: the cases of a table are measured in turns within each round, and a ratio is taken per round against
the first case of the table. The median over rounds and the range of eight rounds in ten are shown. Times in
microseconds are for orientation: on another machine they are others, the ratios much less so. Where another package is
faster it says so.
"""


def main() -> None:
    known = [name for name in TABLES if Path(__file__).with_name(f"{name}.py").exists()]
    chosen = sys.argv[1:] or known
    parts = [f"# Results\n\nOf {date.today().isoformat()}, by `python -m bench.report`.\n", READING, machine()]
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr)
        parts.append(f"## {name}\n\n```text\n{measured(name)}\n```\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def machine() -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    cores = len(re.findall(r"^processor", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [
        f"- {cores} cores ({cpu.group(1) if cpu else platform.machine()}), {platform.system()} {platform.release()}",
        f"- Python {platform.python_version()}; servers on the same machine: {', '.join(servers())}",
        f"- packages: {', '.join(packages())}",
    ]
    return "\n".join(lines) + "\n"


def servers() -> list[str]:
    found = []
    for name, command in SERVERS.items():
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:
            continue
        if number := re.search(r"\d+\.\d+(\.\d+)?", said):
            found.append(f"{name} {number.group()}")
    return found


def packages() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def measured(name: str) -> str:
    command = [sys.executable, "-m", f"bench.{name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {LONGEST:.0f} s"
    left_out = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    failed = [] if done.returncode == 0 else [f"failed: {done.stderr.splitlines()[-1]}"]
    return "\n".join([done.stdout.rstrip(), *left_out, *failed])


if __name__ == "__main__":
    main()
