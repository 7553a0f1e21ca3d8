"""`leasehold bench --until-breaks`: client processes offer more and more load, until they or the engine fall behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import accumulate
from typing import Any, Final, NamedTuple

from leasehold.cli.bench import load_worker, plot
from leasehold.cli.bench.ramp import Ramp, RateStep, break_of, cause_of
from leasehold.errors import Unavailable

_LEAD: Final = 0.2  # seconds until a step begins, so that all processes have read their lines
_CLOSE_SECONDS: Final = 15.0  # for a process to release what it holds


class MachineTimes(NamedTuple):
    """What the processors of this machine did since it started, in ticks."""

    total: int
    idle: int
    disk_wait: int

    @classmethod
    def read(cls) -> MachineTimes | None:
        try:
            with open("/proc/stat") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):  # not Linux
            return None
        return cls(sum(ticks), ticks[3] + ticks[4], ticks[4])


@contextmanager
def client_processes(
    url: str | None, namespace: str, prefix: str, count: int
) -> Iterator[Callable[[float, float], RateStep]]:
    """Start the processes. Yields a function that runs one step: it gets the rate, in pairs a second, and seconds.
    `prefix`: of all names."""
    processes: list[subprocess.Popen[str]] = []
    ready = False
    try:
        for number in range(count):
            facts = {"url": url, "namespace": namespace, "prefix": f"{prefix}{number}/", "parent": os.getpid()}
            processes.append(
                subprocess.Popen(
                    # -P: no modules from the working directory, where other users may have put some
                    [sys.executable, "-P", "-m", "leasehold.cli.bench.load_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others in order
                    env=os.environ | {load_worker.FACTS_VARIABLE: json.dumps(facts)},  # not in argv: `ps` shows that
                )
            )
        for process in processes:
            _read(process)
        ready = True
        yield lambda rate, seconds: _run_step(processes, rate, seconds)
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT if ready else signal.SIGKILL)  # before they are ready, they hold nothing
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in processes:
            _end(process, deadline)


def _end(process: subprocess.Popen[str], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _run_step(processes: Sequence[subprocess.Popen[str]], rate: float, seconds: float) -> RateStep:
    before, share, start = MachineTimes.read(), rate / len(processes), time.monotonic() + _LEAD
    for number, process in enumerate(processes):
        offset = number / rate  # the processes take turns
        _write(process, {"rate": share, "seconds": seconds, "start": start + offset})
    results = [load_worker.StepResult(**_read(process)) for process in processes]
    return summarize(rate, seconds, results, before, MachineTimes.read())


def _write(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None  # noqa: S101  # for the type checker
    with suppress(BrokenPipeError):  # `_read` says why
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None  # noqa: S101  # for the type checker
    line = process.stdout.readline()
    message: dict[str, Any] = json.loads(line) if line else {"failed": f"it exited with {process.wait()}"}
    if "failed" in message:
        raise Unavailable(f"a client process of the benchmark failed: {message['failed']}")
    return message


def summarize(
    rate: float,
    seconds: float,
    results: Sequence[load_worker.StepResult],
    before: MachineTimes | None,
    after: MachineTimes | None,
) -> RateStep:
    latencies = Counter[int]()
    for result in results:
        latencies.update(result.latencies)
    ascending = sorted(latencies)
    errors = sum((Counter(result.errors) for result in results), Counter[str]())
    due = max(1, sum(result.due for result in results))
    machine_cpu = disk_wait = None
    if before is not None and after is not None and after.total > before.total:
        ticks = after.total - before.total
        machine_cpu = 1 - (after.idle - before.idle) / ticks
        disk_wait = (after.disk_wait - before.disk_wait) / ticks
    # A pair that failed or was not done in time has no latency. Those count as slower than every other.
    longest = 1000 * (seconds + load_worker.GRACE)
    ranks = list(accumulate(latencies[micros] for micros in ascending))
    p50, p95, p99 = (
        ascending[index] / 1000
        if (index := bisect_right(ranks, min(int(due * share), due - 1))) < len(ascending)
        else longest
        for share in (0.5, 0.95, 0.99)
    )
    return RateStep(
        rate=rate,
        done=rate * latencies.total() / due,
        p50=p50,
        p95=p95,
        p99=p99,
        errors=errors.total() / due,
        error=errors.most_common(1)[0][0] if errors else None,
        client_cpu=max(result.cpu for result in results),
        machine_cpu=machine_cpu,
        disk_wait=disk_wait,
    )


def run(
    url: str | None,
    namespace: str,
    prefix: str,
    processes: int,
    seconds: float,
    p99_limit: float,
    report: Callable[[RateStep], None],
) -> Ramp:
    """Raise the load until it breaks. `report` is called after each step."""
    ramp = Ramp(p99_limit)
    with client_processes(url, namespace, prefix, processes) as run_step:
        run_step(20.0, 0.5)  # warm up: connections, scripts, caches
        while (rate := ramp.next_rate()) is not None:
            ramp.add(run_step(rate, seconds))
            report(ramp.steps[-1])
    return ramp


HEADER: Final = f"{'pairs/s':>10} {'done/s':>10} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9} {'errors':>7}  {'broke by'}"


def format_step(step: RateStep, p99_limit: float) -> str:
    return (
        f"{step.rate:>10,.0f} {step.done:>10,.0f} {step.p50:>9,.2f} {step.p95:>9,.2f} {step.p99:>9,.2f} "
        f"{step.errors:>7.1%}  {break_of(step, p99_limit) or ''}"
    ).rstrip()


def conclusion(ramp: Ramp, processes: int) -> str:
    if ramp.broken is None:
        return f"did not break, up to {ramp.steps[-1].rate:,.0f} pairs a second"
    if ramp.sustained is None:
        sustained = "no rate was sustained"
    else:
        sustained = f"sustained {ramp.sustained.rate:,.0f} pairs a second ({2 * ramp.sustained.rate:,.0f} requests)"
    return (
        f"{sustained}; broke at {ramp.broken.rate:,.0f}: {break_of(ramp.broken, ramp.p99_limit)}\n"
        f"limited by {cause_of(ramp.broken, processes)}"
    )


def as_json(engine: str, ramp: Ramp, processes: int) -> dict[str, Any]:
    return {
        "engine": engine,
        "processes": processes,
        "p99_limit": ramp.p99_limit,
        "sustained": None if ramp.sustained is None else ramp.sustained.rate,
        "broke_at": None if ramp.broken is None else ramp.broken.rate,
        "broke_by": None if ramp.broken is None else break_of(ramp.broken, ramp.p99_limit),
        "limited_by": None if ramp.broken is None else cause_of(ramp.broken, processes),
        "steps": [{**asdict(step), "broke_by": break_of(step, ramp.p99_limit)} for step in ramp.steps],
    }


def draw(engine: str, ramp: Ramp) -> str:
    """The curve as SVG: latency by offered rate. Of a repeated step, the last try."""
    by_rate = {step.rate: step for step in ramp.steps}
    lines = {
        name: [(rate, max(getattr(by_rate[rate], name), 0.01)) for rate in sorted(by_rate)]
        for name in ("p50", "p95", "p99")
    }
    return plot.svg(
        f"{engine}: latency of a pair by offered load",
        "pairs of acquire and release a second",
        "milliseconds",
        lines,
        level=(f"limit of p99: {ramp.p99_limit:g} ms", ramp.p99_limit),
        at=None if ramp.broken is None else (f"broke at {ramp.broken.rate:,.0f}", ramp.broken.rate),
    )
