"""`leasehold doctor`: check the configuration of an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import click

from leasehold.blocking import Client
from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.doctor import host, real_lock, servers
from leasehold.cli.doctor.findings import SEVERITIES, Finding, worst
from leasehold.cli.help import command
from leasehold.core.texts import escape
from leasehold.engines import health
from leasehold.errors import Unsupported
from leasehold.runtime.base import run_sync

EXAMPLES = """
leasehold doctor                                  the engine of LEASEHOLD_URL, or your SQLite file
leasehold doctor redis://locks-1:6379             another engine; exit code 0, 1 or 2
leasehold -o json doctor | jq '.findings[] | select(.severity != "ok")'
"""

_SECONDS: Final = 5.0  # for the probe of all servers
_COLOURS: Final = {"ok": "green", "note": "blue", "warning": "yellow", "danger": "red"}
_MOUNTS: Final = "/proc/self/mounts"


@command(
    "doctor",
    EXAMPLES,
    exit_codes.CHECK_FAILED,
    exit_codes.DANGER,
    exit_codes.CONFIG,
    short_help="Find what is unsafe about an engine's configuration.",
)
@click.argument("engine_url", required=False, metavar="[URL]")
@click.option("--strict", is_flag=True, help="Exit 1 for notes as well.")
@pass_console
def doctor(console: Console, engine_url: str | None, strict: bool) -> int:
    """Find what is unsafe about an engine's configuration, and how to fix it.

    Probes the engine's servers (settings, storage, quorum, replication, clocks), then acquires, renews, hands over
    and breaks a real lock in a namespace of its own, which it leaves empty. Nothing else is written.

    Each finding has a severity (`ok`, `note`, `warning` or `danger`), the promise that it affects (E1 to E9: `leasehold
    docs guarantees`), and what to do. Six mistakes that have cost others their data have names: single-redis-as-truth,
    no-ttl, no-owner-check, client-clock, no-monitoring, never-tested.

    With `-o json`: one object, described by `leasehold docs reference/json`.
    """
    with console._replace(url=console.url if engine_url is None else engine_url).client() as client:
        config = client._core.config
        findings = list(_examine(client))
    findings.sort(key=lambda each: -SEVERITIES.index(each.severity))
    if console.json:
        found = [dict(zip(Finding._fields, each, strict=True)) for each in findings]
        console.put_json({"engine": config.scheme, "severity": worst(findings), "findings": found})
    else:
        for finding in findings:
            _print(console, finding)
    severity = worst(findings)
    if severity == "danger":
        return exit_codes.DANGER
    return exit_codes.CHECK_FAILED if severity == "warning" or (severity == "note" and strict) else exit_codes.OK


def _examine(client: Client) -> Iterator[Finding]:
    config, runtime = client._core.config, client._core.runtime
    try:
        state = run_sync(health(config, runtime, runtime.now() + _SECONDS))
    except Unsupported:
        yield Finding("reachable", "note", f"{config.scheme}:// has no health probe", "only a real lock is tested")
    else:
        yield from servers.check_servers(state, config.scheme)
        if config.scheme == "sqlite" and state.members and os.path.exists(_MOUNTS):
            with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
                yield host.check_file_system(state.members[0].member, mounts)
        if not state.up:
            return
    yield host.check_clock(host.clock_state())
    yield from real_lock.check_lifetimes(client)
    yield from real_lock.try_lock(config.url, runtime)


def _print(console: Console, finding: Finding) -> None:
    mark = click.style(finding.severity.upper().ljust(7), fg=_COLOURS[finding.severity], bold=True)
    promise = f" ({finding.promise})" if finding.promise else ""
    flag = f" [{finding.red_flag}]" if finding.red_flag else ""
    console.put(f"{mark}  {finding.check.ljust(12)}  {escape(finding.found)}{promise}{flag}")
    if finding.fix:
        console.put(f"{'':9}{'':14}-> {escape(finding.fix)}")
