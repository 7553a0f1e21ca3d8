"""Run every table, one after the other, and write `bench/RESULTS.md`: `python -m bench.report [TABLE ...]`.

Each table runs in a process of its own, as it would by hand. The page says on which machine and with which versions.
What was measured is kept in `results.json` beside it, from which the page and its plots are made: tables that are not
named stay as they are there.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.__main__ import TABLES
from bench.cases import Table, part_of
from bench.plot import bars

PAGE: Final = Path(__file__).with_name("RESULTS.md")
KEPT: Final = PAGE.with_name("results.json")
PLOTS: Final = PAGE.with_name("plots")
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
    chosen = sys.argv[1:] or TABLES
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr)
        kept[name] = {"date": date.today().isoformat(), **measured(name)}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


def page(kept: dict[str, Any]) -> str:
    """Also draws a plot of each table."""
    PLOTS.mkdir(exist_ok=True)
    said = ["# Results\n\nBy `make bench ARGS=report`.\n", READING, machine()]
    for name in (name for name in TABLES if name in kept):
        said.append(f"## {name}\n\nOf {kept[name]['date']}.\n")
        for number, part in enumerate(map(part_of, kept[name]["parts"])):
            if isinstance(part, Table):
                plot = PLOTS / f"{name}-{number}.svg"
                plot.write_text(bars(part.title, [(one.name, one.ratio) for one in part.results]), encoding="utf-8")
                said.append(f"![{part.title}](plots/{plot.name})\n")
            said.append(f"```text\n{part}\n```\n")
        said += [f"{line}\n" for line in kept[name]["left_out"]]
    return "\n".join(said)


def machine() -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    cores = len(re.findall(r"^processor", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE))
    kernel, *_ = platform.release().split("-")
    lines = [
        f"- {cores} cores ({cpu.group(1) if cpu else platform.machine()}), {platform.system()} {kernel}",
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


def measured(name: str) -> dict[str, Any]:
    """What it printed; and what was left out, with the reason."""
    command = [sys.executable, "-m", "bench", "--json", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return {"parts": [], "left_out": [f"Not done after {LONGEST:.0f} s."]}
    left_out = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    failed = [] if done.returncode == 0 else [f"Failed: {done.stderr.splitlines()[-1]}"]
    return {"parts": [json.loads(line) for line in done.stdout.splitlines()], "left_out": [*left_out, *failed]}


if __name__ == "__main__":
    main()
