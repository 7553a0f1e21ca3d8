"""Run every table, one after the other, and write `bench/RESULTS.md`: `python -m bench.report [TABLE ...]`.

Each table runs in its own process, as it would by hand. The page names the machine and the versions. The results are
stored in `results.json` next to it, from which the page and its plots are generated. Tables that are not named keep
their stored results.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.__main__ import TABLES
from bench.cases import Aims, Table, part_from_json
from leasehold.cli.bench.plot import bars

RESULTS_PAGE: Final = Path(__file__).with_name("RESULTS.md")
RESULTS_FILE: Final = RESULTS_PAGE.with_name("results.json")
PLOTS: Final = RESULTS_PAGE.with_name("plots")
TABLE_TIMEOUT: Final = 900.0  # seconds per table
ROUNDS: Final = 7  # fewer than by hand, so that all tables take a quarter of an hour

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
How to read it: within each round the cases of a table are measured in turns, and each ratio compares a case with the
first case of the table in the same round. The tables show the median of the rounds and the range of eight rounds in
ten. Times in microseconds are for orientation: they differ from machine to machine, the ratios much less.
"""


def main() -> None:
    chosen = sys.argv[1:] or TABLES
    results: dict[str, Any] = json.loads(RESULTS_FILE.read_text(encoding="utf-8")) if RESULTS_FILE.exists() else {}
    results = {name: results[name] for name in TABLES if name in results}
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr)
        began = time.monotonic()
        measured = run_table(name)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr)
        load = round(os.getloadavg()[0])  # of the last minute: with what the table itself caused
        results[name] = {"date": date.today().isoformat(), "load": load, **measured}
        RESULTS_FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    RESULTS_PAGE.write_text(page(results), encoding="utf-8")


def page(results: dict[str, Any]) -> str:
    """Write the page as text, and draw a plot of each table."""
    PLOTS.mkdir(exist_ok=True)
    sections = ["# Results\n\nBy `make bench ARGS=report`.\n", READING, machine(), aims_section(results)]
    for name in (name for name in TABLES if name in results):
        load = f", at a load average of {results[name]['load']}" if "load" in results[name] else ""
        sections.append(f"## {name}\n\nOf {results[name]['date']}{load}.\n")
        for number, part in enumerate(map(part_from_json, results[name]["parts"])):
            if isinstance(part, Table):
                plot = PLOTS / f"{name}-{number}.svg"
                plot.write_text(
                    bars(part.title, [(result.name, result.ratio) for result in part.results]), encoding="utf-8"
                )
                sections.append(f"![{part.title}](plots/{plot.name})\n")
            sections.append(f"```text\n{part}\n```\n")
        sections += [f"{line}\n" for line in results[name]["left_out"]]
    return "\n".join(sections)


def aims_section(results: dict[str, Any]) -> str:
    rows = aim_rows(results)
    met = sum(row[-1] == "yes" for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in (("what", "measured", "aim", "met"), ("---",) * 4, *rows)]
    return f"## Aims\n\n{met} of {len(rows)} are met.\n\n" + "\n".join(lines) + "\n"


def aim_rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """All aims, in the order of the tables: what, measured, aim, met or not."""
    parts = [part_from_json(part) for name in TABLES if name in results for part in results[name]["parts"]]
    return [aim.texts() for part in parts if isinstance(part, Aims) for aim in part.aims]


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
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:
            continue
        if number := re.search(r"\d+\.\d+(\.\d+)?", output):
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


def run_table(name: str) -> dict[str, Any]:
    """Return the parts that the table printed, and what was left out with the reason."""
    command = [sys.executable, "-m", "bench", "--rounds", str(ROUNDS), "--json", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TABLE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"parts": [], "left_out": [f"Not done after {TABLE_TIMEOUT:.0f} s."]}
    left_out = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    failed = [] if done.returncode == 0 else [f"Failed: {done.stderr.splitlines()[-1]}"]
    return {"parts": [json.loads(line) for line in done.stdout.splitlines()], "left_out": [*left_out, *failed]}


if __name__ == "__main__":
    main()
