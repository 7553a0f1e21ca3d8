"""What tests read and change inside the commands."""

from __future__ import annotations

import os
from typing import Any

from leasehold.cli import history, server_api, stats
from leasehold.cli.bench import load_worker
from leasehold.cli.bench.load_worker import LoadGenerator
from leasehold.cli.demo import thundering_herd
from leasehold.cli.demo.runner import WorkerProcess
from leasehold.cli.doctor import command as doctor
from leasehold.cli.doctor import real_lock, servers
from leasehold.cli.run.command import run
from leasehold.cli.run.orphan_killer import OrphanKiller
from leasehold.cli.top import source as top
from leasehold.cli.top.source import Source
from tests.support.probe import Place

# Limits that tests change.
DEAD_ROWS_NOTE = Place(servers, "_DEAD_ROWS_NOTE")  # of a table, from which `doctor` reports them
DRAIN_SECONDS = Place(load_worker, "_DRAIN")  # after the end of a step, for what has begun
FAILED_NAME_SECONDS = Place(load_worker, "_HELD_SECONDS")  # until a name is used again whose release may have failed
FAILED_PAIR_SECONDS = Place(load_worker, "_PAUSE_AFTER_FAILURE")  # in which it still counts as one under way
LIST_SECONDS = Place(top, "_LIST_SECONDS")  # for the list of a server
MAX_CLAIMS = Place(top, "_MAX_CLAIMS")  # of the list of a server
MAX_ERROR_TEXTS = Place(load_worker, "_MAX_ERROR_TEXTS")  # that a step keeps
MAX_RUNNING = Place(load_worker, "_MAX_RUNNING")  # pairs at a time
SERVER_TIMEOUT = Place(server_api, "_TIMEOUT")  # of a request to a lock server

RUN_HERD_ONCE = Place(thundering_herd, "_run_once")  # the demo, which may repeat it

# Steps of `doctor`.
check_break = real_lock._check_break
examine = doctor._examine
measure_round_trip = real_lock._measure
CheckFailed = real_lock._Failed

read_past_grant = history._read
stats_lines = stats._stats_lines


def split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """The options of `leasehold run`, and the command."""
    head, command = run._split_args(words)
    return head, command


# --------------------------------------------------------------------- bench


def free_locks(generator: LoadGenerator) -> list[Any]:
    """Those that no pair of calls uses."""
    return generator._free


# ----------------------------------------------------------------------- run


def pretend_wrapper_died(killer: OrphanKiller) -> None:
    """Close the killer's connection to `leasehold run`, as the kernel does when that ends."""
    killer._writer.close()


def has_ended(killer: OrphanKiller) -> bool:
    """Whether its process has, which this call then reaps."""
    return os.waitpid(killer._pid, os.WNOHANG)[0] != 0


# ---------------------------------------------------------------------- demo


def process_of(worker: WorkerProcess) -> Any:
    return worker._process


# ----------------------------------------------------------------------- top


def observe_life(source: Source, holding: Any, at: float) -> Any:
    """What `top` learns of a lease from a list that it read at this time."""
    life = source._lives[holding.fingerprint] = source._life(holding, at)
    return life


def read_server(source: Source, server: Any) -> Any:
    """Read the list of a lock server."""
    return source._read_server(server)
