"""Run one cell of the fault table, or all of them: contenders as processes, real servers, one fault, and a verdict.

Exit status: 0 if the run was valid, 1 if it broke a promise, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from harness.lab import evidence
from harness.lab.evidence import Result
from harness.lab.expectations import Expectation, cells, of_all
from harness.lab.faults import FAULTS, SOAK_FAULT, in_turn
from harness.lab.run import CONTENDERS, CROWD, Run
from harness.lab.setups import SETUPS, CannotRun, Setup
from harness.lab.soak import NoCapacity, Residue
from harness.lab.verdict import Verdict
from leasehold.testing import Absent

VALID, VIOLATED, COULD_NOT_RUN = 0, 1, 2
SEEDS: Final = 3
SOAK_SECONDS: Final = 600.0
_ISOLATED: Final = "LEASEHOLD_LAB_ISOLATED"  # set in a process that has namespaces of its own


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> int:
    arguments = parse_arguments()
    try:
        return run_matrix(arguments) if arguments.matrix else run_cell(arguments)
    except KeyboardInterrupt:
        say("interrupted; the evidence has all results that were added before")
        return COULD_NOT_RUN
    except (CannotRun, Absent, NoCapacity) as why:
        say(f"{arguments.setup} {arguments.fault} could not run: {why}")
        return COULD_NOT_RUN
    except Exception:  # of the lab itself: a server that did not start in time, for example
        traceback.print_exc()
        return COULD_NOT_RUN


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def date(text: str) -> str:
    """As the evidence has it, so that texts compare as dates do."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a date like 2026-11-19") from None


def crowd_size(text: str) -> int:
    number = count(text)
    if number % CONTENDERS:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {CONTENDERS}, the number of processes")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.lab", description=__doc__)
    words = [*SETUPS, *FAULTS]
    parser.add_argument("setup", nargs="?", metavar="ENGINE", help=", ".join(SETUPS))
    parser.add_argument(
        "fault", nargs="?", metavar="FAULT[,FAULT]", help=f"{', '.join([*FAULTS, 'soak'])}; several follow one another"
    )
    parser.add_argument(
        "--seconds", type=positive, help=f"inject faults for this long (default: 20; a soak: {SOAK_SECONDS:.0f})"
    )
    parser.add_argument("--seed", type=int, default=1, help="decides what is chosen at random (default: 1)")
    parser.add_argument("--crowd", type=crowd_size, default=CROWD, metavar="N", help=f"tasks of `crowd` ({CROWD})")
    parser.add_argument(
        "--capacity",
        type=positive,
        metavar="PAIRS",
        help="of a soak: pairs of acquire and release a second that the servers sustain (default: it is measured)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plain", action="store_true", help="no fence at the account")
    mode.add_argument("--fenced", action="store_false", dest="plain", help="a fence at the account (default)")
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        help=f"add the result to {evidence.EVIDENCE.name} (default: of a soak of {SOAK_SECONDS:.0f} s or more, yes)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--history", metavar="FILE", help="write everything that was recorded there, as JSON lines")
    parser.add_argument("--matrix", action="store_true", help="all cells that are not in the evidence yet (default)")
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"of the matrix: seeds per cell (default: {SEEDS})")
    parser.add_argument("--jobs", type=count, default=2, help="of the matrix: cells side by side (default: 2)")
    parser.add_argument(
        "--older-than", type=date, metavar="DATE", help="of the matrix: run those again that are older (2026-11-19)"
    )
    parser.add_argument(
        "--only", action="append", choices=words, metavar="WORD", help="of the matrix: only this engine or fault"
    )
    parser.add_argument(
        "--skip", action="append", choices=words, metavar="WORD", help="of the matrix: not this engine or fault"
    )
    found = parser.parse_args()
    if found.setup == "soak" and found.fault is None:
        found.setup, found.fault = "redis-aof", "soak"
    found.matrix = found.matrix or found.setup is None
    found.faults = (found.fault or "").split(",")
    known = found.fault == "soak" or all(fault in FAULTS for fault in found.faults)
    if not found.matrix and (found.setup not in SETUPS or not known):
        parser.error(f"give an engine ({', '.join(SETUPS)}) and a fault ({', '.join([*FAULTS, 'soak'])})")
    if found.keep and len(found.faults) > 1:
        parser.error("--keep: the evidence has the results of single faults")
    soaks = found.fault == "soak"
    found.seconds = found.seconds or (SOAK_SECONDS if soaks else 20.0)
    if found.keep is None:  # nobody should have to repeat ten minutes for an option
        found.keep = soaks and found.seconds >= SOAK_SECONDS
    return found


# ------------------------------------------------------------------ one cell


def run_cell(arguments: argparse.Namespace) -> int:
    try:
        fault, expectation = (
            (SOAK_FAULT, Expectation())
            if arguments.fault == "soak"
            else (in_turn(arguments.faults), of_all(arguments.setup, arguments.faults))
        )
    except ValueError as why:
        raise CannotRun(str(why)) from None
    setup_type = SETUPS[arguments.setup]
    isolate(setup_type, fault.needs)
    setup = setup_type(fault.needs)
    run = Run(
        setup,
        fault,
        expectation,
        seconds=arguments.seconds,
        seed=arguments.seed,
        plain=arguments.plain,
        crowd=arguments.crowd,
        capacity=arguments.capacity,
        report=lambda text: say(f"{arguments.setup} {arguments.fault}: {text}"),
    )
    verdict = run.execute()
    if fault.pauses and arguments.plain and not verdict.lost_updates and not verdict.violations:
        raise CannotRun("no update was lost without a fence, so the fault had no effect")
    result = evidence.result(arguments.setup, arguments.fault, setup.version(), arguments, verdict)
    if run.residue is not None:
        result["soak"] = run.residue._asdict()
        explain_soak(run.residue)
    if arguments.keep:
        evidence.save([result])
    if arguments.history:
        evidence.write_history(arguments.history, run.recording)
    explain(arguments, verdict)
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    return VIOLATED if verdict.violations or verdict.late else VALID


def isolate(setup: type[Setup], needs: frozenset[str]) -> None:
    """Start over in namespaces of its own, where the fault needs them: small disks, hosts that can be partitioned."""
    apart = "sites" in needs or ("hosts" in needs and setup.on_hosts)
    flags = ["-m"] if "disk" in needs else ["-n", "-m"] if apart else []
    if not flags or _ISOLATED in os.environ:
        return
    if os.getuid() != 0 or subprocess.run(["unshare", *flags, "true"], check=False).returncode:  # noqa: S607
        raise CannotRun("needs root, for namespaces of its own")
    os.environ[_ISOLATED] = "1"
    command = ["unshare", *flags, sys.executable, "-m", "harness.lab", *sys.argv[1:]]
    os.execvp(command[0], command)  # noqa: S606


def explain(arguments: argparse.Namespace, verdict: Verdict) -> None:
    say(
        f"{arguments.setup} {arguments.fault}, seed {arguments.seed}, {'plain' if arguments.plain else 'fenced'}: "
        f"{'VIOLATED' if verdict.violations else 'late' if verdict.late else 'valid'}\n"
        f"  {verdict.faults} faults, {verdict.operations} operations, {verdict.grants} grants, {verdict.refusals} "
        f"refusals, {verdict.stale} stale accesses refused, {verdict.lost_updates} updates lost\n"
        f"  {verdict.losses} leases lost, {verdict.overlaps} times two holders, longest gap without a holder "
        f"{verdict.longest_gap} s (refused meanwhile: {verdict.refused_in_gap}), requests per grant "
        f"{verdict.requests_per_grant or '-'}"
    )
    for text in (*verdict.violations, *verdict.late):
        say(f"  {text}")
    if verdict.bad_part:
        say("  the shortest bad part:")
    for event in verdict.bad_part:
        say(f"    {event.at:.6f} {event.process} {event.what} {' '.join(map(str, event.details))}")


def explain_soak(residue: Residue) -> None:
    say(f"offered {residue.rate:,} of {residue.capacity:,} pairs a second; {residue.claims} claims left")
    for step in residue.load:
        latency = f"p50 {step['p50']:.1f}, p99 {step['p99']:.1f} ms"
        say(f"  done {step['done']:,.0f} a second, {latency}, failed {step['errors']:.1%}")
    for process, figures in residue.growth.items():
        say(f"  {process}: " + ", ".join(f"{what} {first:g} to {last:g}" for what, (first, last) in figures.items()))


# ------------------------------------------------------------------ all cells


def run_matrix(arguments: argparse.Namespace) -> int:
    oldest = arguments.older_than or ""
    done = {evidence.identity(each) for each in evidence.load() if each["date"] >= oldest}
    todo = [job for job in matrix(arguments.seeds, arguments.only, arguments.skip) if job not in done]
    say(f"{len(todo)} runs to do, {len(done)} done before")
    codes: list[int] = []

    def work(job: tuple[str, str, bool, int]) -> None:
        code, result = run_apart(job, arguments)
        if result is not None:
            evidence.save([result])
        codes.append(code)
        word = "late" if result and code and not result["violations"] else ("valid", "VIOLATED", "could not run")[code]
        say(f"{len(codes)} of {len(todo)}: {' '.join(map(str, job))}: {word}")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(work, todo))
    return VIOLATED if VIOLATED in codes else COULD_NOT_RUN if COULD_NOT_RUN in codes else VALID


def matrix(
    seeds: int, only: Sequence[str] | None = None, skip: Sequence[str] | None = None
) -> list[tuple[str, str, bool, int]]:
    """Setup, fault, plain and seed of all runs; those of one seed together, so that an early end leaves all cells."""
    return [
        (setup, fault, plain, seed)
        for seed in range(1, seeds + 1)
        for setup, fault, _ in cells()
        for plain in ([False, True] if FAULTS[fault].pauses else [False])
        if (not only or {setup, fault} & set(only)) and not {setup, fault} & set(skip or ())
    ]


def run_apart(job: tuple[str, str, bool, int], arguments: argparse.Namespace) -> tuple[int, Result | None]:
    setup, fault, plain, seed = job
    options = ["--json", "--seconds", str(arguments.seconds), "--seed", str(seed), "--crowd", str(arguments.crowd)]
    command = [sys.executable, "-m", "harness.lab", setup, fault, *options, *(["--plain"] if plain else [])]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = finished.stdout.splitlines()
    if finished.returncode not in (VALID, VIOLATED) or not lines:
        say(finished.stderr[-1500:])
        return COULD_NOT_RUN, None
    if finished.returncode == VIOLATED:
        say(finished.stderr[-1500:] + lines[-1])
    return finished.returncode, json.loads(lines[-1])


if __name__ == "__main__":
    sys.exit(main())
