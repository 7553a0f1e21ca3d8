"""`leasehold stats`: how much is going on, how long it takes and what goes wrong, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import click

from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command
from leasehold.cli.options import positive_seconds_option
from leasehold.cli.server_api import ServerApi, is_server, reading
from leasehold.core.deadlocks import deadlocks
from leasehold.core.texts import escape
from leasehold.model import Holding

EXAMPLES = """
leasehold stats -u http://locks:7420
leasehold stats -u http://locks:7420 --namespace shop --since 1h
leasehold stats -u redis://10.0.0.5             what the engine itself knows
"""

_MAX_SECONDS: Final = 3600.0  # that a server remembers
_GROUPS: Final = 5
_COLUMNS: Final = ("GROUP", "ACQUIRES/S", "CONTENTION", "DIRECT P95", "QUEUED P95", "LOST", "REFUSED")


@command("stats", EXAMPLES, exit_codes.UNREACHABLE, exit_codes.CONFIG, short_help="Print rates, latencies and losses.")
@positive_seconds_option(
    "--since",
    default="5m",
    show_default=True,
    help="Statistics of the last SECS, in steps of 10 seconds; at most one hour.",
)
@pass_console
def stats(console: Console, since: float) -> None:
    """Print what happens in the namespace: how often locks are acquired, how long that takes, and what goes wrong.

    Needs a lock server, which remembers one hour of what went through it and its peers. With the URL of an engine, this
    prints what the engine knows: holders and waiters now.

    `direct` acquires met no other holder: their time is what the engine and the network cost. `queued` acquires had to
    wait. Contention is the share of acquires that met another holder, errors the share that got no answer
    from the engine. Quantiles are estimated from histograms.

    With `-o json`: one object, described by `leasehold docs reference/json`.
    """
    if is_server(console.url):
        _print_server(console, since)
    else:
        _print_engine(console)


def _print_engine(console: Console) -> None:
    with console.client() as client:
        now = _now(client.inspect())
    if console.json:
        console.put_json({"now": now, "stats": None, "missing": []})
        return
    for line in _now_lines(now):
        console.put(line)
    console.say(
        "rates, latencies and losses need a lock server, which sees every acquire: pass the URL of one, or read the "
        "metrics of your programs (`leasehold docs operations/metrics`)"
    )


def _print_server(console: Console, since: float) -> None:
    if since > _MAX_SECONDS:
        raise click.UsageError("--since is at most one hour: that is what a server remembers")
    with console.client() as client, closing(ServerApi(console.url)) as server:
        now = _now(client.inspect())
        found = server.get("/v1/stats", namespace=console.namespace, seconds=max(1, round(since)))
    with reading("/v1/stats"):
        stats, missing = found["stats"], ", ".join(map(str, found["missing"]))
        lines = _stats_lines(stats)
    if console.json:
        console.put_json({"now": now, "stats": stats, "missing": found["missing"]})
        return
    for line in [*_now_lines(now), *lines]:
        console.put(line)
    if missing:
        console.say(f"not counted, because they do not answer: {missing}", error=True)


def _now(holdings: Sequence[Holding]) -> dict[str, Any]:
    """What `inspect` shows."""
    held = [each for each in holdings if each.state == "held"]
    waiting = [each for each in holdings if not render.blocks_others(each)]
    names: dict[str, int] = {}
    for each in waiting:
        names[each.name] = names.get(each.name, 0) + 1
    longest = max(names, key=lambda name: names[name], default=None)
    return {
        "held": len(held),
        "waiting": len(waiting),
        "names": len({each.name for each in holdings}),
        "oldest_hold": max((render.rounded(each.age) for each in held if each.since_grant), default=None),
        "oldest_wait": max((render.rounded(each.age) for each in waiting), default=None),
        "longest_queue": None if longest is None else {"name": longest, "waiters": names[longest]},
        "deadlocks": len(deadlocks(holdings)),
    }


def _now_lines(now: Mapping[str, Any]) -> list[str]:
    lines = [
        _line(
            "now", f"{now['held']:,} held, {now['waiting']:,} waiting, {now['names']:,} name{'s' * (now['names'] != 1)}"
        ),
        _line("oldest", f"hold {_seconds(now['oldest_hold'])}, wait {_seconds(now['oldest_wait'])}"),
    ]
    if now["longest_queue"] is not None:
        queue = now["longest_queue"]
        lines.append(_line("longest queue", f"{queue['waiters']:,} at {escape(queue['name'])}"))
    return [
        *lines,
        _line("deadlocks", f"{now['deadlocks']:,}" + (": see leasehold deadlocks" if now["deadlocks"] else "")),
    ]


def _stats_lines(stats: Mapping[str, Any]) -> list[str]:
    total = stats["total"]
    counts = total["counts"]
    lost, renewals = counts.get("lost") or {}, counts.get("renewals") or {}
    reasons = ", ".join(
        f"{escape(reason)} {count:,}" for reason, count in sorted(lost.items(), key=lambda item: -item[1])
    )
    lines = [
        "",
        _line("the last", render.duration(stats["until"] - stats["since"])),
        _line("acquires", f"{sum((counts.get('acquires') or {}).values()):,}, {total['rate']:,.2f}/s"),
        _line("contention", f"{total['contention']:.1%}"),
        _line("errors", f"{total['errors']:.1%}"),
        _line("direct", _quantiles(total["direct"])),
        _line("queued", _quantiles(total["queued"])),
        _line("held for", _quantiles(total["held"])),
        _line("renewals", f"{renewals.get('ok', 0):,} confirmed, {renewals.get('failed', 0):,} failed"),
        _line("leases lost", f"{sum(lost.values()):,}" + (f": {reasons}" if reasons else "")),
        _line("refused tokens", f"{counts.get('refused', 0):,}"),
        _line("broken", f"{counts.get('broken', 0):,}"),
    ]
    worst = sorted(stats["groups"], key=_badness, reverse=True)[:_GROUPS]
    if worst:
        lines += ["", *render.table(_COLUMNS, [_group_row(group) for group in worst])]
    return lines


def _badness(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Lost and refused first, then what waits longest."""
    counts = group["counts"]
    wrong = sum((counts.get("lost") or {}).values()) + counts.get("refused", 0)
    return wrong, group["errors"], (group["queued"] or [0, 0])[1], group["contention"], group["rate"]


def _group_row(group: Mapping[str, Any]) -> tuple[str, ...]:
    counts = group["counts"]
    return (
        group["group"],
        f"{group['rate']:,.2f}",
        f"{group['contention']:.1%}",
        _seconds(group["direct"] and group["direct"][1]),
        _seconds(group["queued"] and group["queued"][1]),
        f"{sum((counts.get('lost') or {}).values()):,}",
        f"{counts.get('refused', 0):,}",
    )


def _line(what: str, text: str) -> str:
    return f"{what:<16}{text}"


def _quantiles(found: Sequence[float] | None) -> str:
    if not found:
        return "none"
    return ", ".join(f"p{number} {_seconds(value)}" for number, value in zip((50, 95, 99), found, strict=True))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else render.short_duration(seconds)
