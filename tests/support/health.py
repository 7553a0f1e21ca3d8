"""Runs the health probe of an engine in both runtimes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from leasehold import engines
from leasehold.config import EngineConfig
from leasehold.engines.probe import Health, MemberHealth
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads
from tests.support.timing import MEASURING, check_elapsed

RUNTIMES = ("blocking", "asyncio")
PATIENT = 30.0  # seconds: far more than a probe of servers that answer needs, even on a busy machine
SHORT, LONG = 1.0, 8.0  # seconds, for servers that do not answer


def probe(url: str, seconds: float = PATIENT, runtime: str = "blocking") -> Health:
    config = EngineConfig.parse(url, 5.0)
    if runtime == "blocking":
        threads = Threads()
        return run_sync(engines.health(config, threads, threads.now() + seconds))

    async def run() -> Health:
        loop = Loop()
        loop.bind()
        try:
            return await engines.health(config, loop, loop.now() + seconds)
        finally:
            loop.close()

    return asyncio.run(run())


def probe_silent(url: str, runtime: str, *, others_answer: bool = False) -> Health:
    """Probe servers that do not answer: the deadline must be kept. Others have as long as a busy machine needs."""
    seconds = SHORT if MEASURING or not others_answer else LONG
    began = time.monotonic()
    found = probe(url, seconds, runtime)
    check_elapsed(began, seconds + 0.5)
    return found


def settings_found(member: MemberHealth) -> dict[str, str]:
    return {finding.setting: finding.value for finding in member.findings}


def storage_of(member: MemberHealth, store: str) -> Any:
    return next((each for each in member.storage if each.store == store), None)
