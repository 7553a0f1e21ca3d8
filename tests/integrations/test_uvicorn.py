"""FastAPI under uvicorn with four worker processes: one lock at a time, one job at a time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.servers.process import free_ports
from leasehold import Client
from tests.support.client_fixtures import poll_until
from tests.support.paths import child_environment

pytestmark = pytest.mark.extended

APP = """
import asyncio, os
from fastapi import Depends, FastAPI
from leasehold import AsyncClient
from leasehold.integrations.fastapi import lifespan, lock

def note(text):
    with open("log", "a") as file:
        file.write(f"{text} {os.getpid()}\\n")

async def job(lease):
    note("start")
    try:
        await asyncio.sleep(3600)
    finally:
        note("stop")

client = AsyncClient(ttl=6, namespace=os.environ["LEASEHOLD_NAMESPACE"])
app = FastAPI(lifespan=lifespan(client, jobs={"job": job}))

@app.post("/orders/{order_id}", dependencies=[Depends(lock("order:{order_id}", wait=120))])
async def pay(order_id: int):
    note("in")
    await asyncio.sleep(0.01)
    note("out")

@app.post("/try/{order_id}", dependencies=[Depends(lock("order:{order_id}"))])
async def attempt(order_id: int):
    note("in")
"""


class Workers:
    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        (folder / "shop.py").write_text(APP)
        self._folder, self._port = folder, free_ports(1)[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "shop:app", "--workers", "4", "--port", str(self._port)],
            cwd=folder,
            env=child_environment(**variables),
        )

    def notes(self) -> list[tuple[str, int]]:
        log = self._folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(text, int(pid)) for text, pid in map(str.split, lines)]

    def leaders(self) -> list[int]:
        return [pid for text, pid in self.notes() if text == "start"]

    def post(self, path: str) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self._port}{path}", timeout=120)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture
def workers(tmp_path, engine_variables) -> Iterator[Workers]:
    workers = Workers(tmp_path, engine_variables)
    try:
        poll_until(workers.leaders, 240)
        yield workers
    finally:
        workers.stop()


def test_four_uvicorn_workers_share_one_lock_and_one_job(workers, engine_variables) -> None:
    def paid() -> list[tuple[str, int]]:
        return [(text, pid) for text, pid in workers.notes() if text in ("in", "out")]

    def several_workers_were_paid() -> bool:
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda _: workers.post("/orders/7").status_code, range(48)))
        assert answers == [200] * 48
        return len({pid for _, pid in paid()}) > 1

    poll_until(several_workers_were_paid, 240)  # at first there may be only one worker: the others are still starting
    notes = paid()
    assert all(text == "in" and notes[n + 1] == ("out", pid) for n, (text, pid) in enumerate(notes) if n % 2 == 0)

    with Client(engine_variables["LEASEHOLD_URL"], namespace=engine_variables["LEASEHOLD_NAMESPACE"]) as client:
        with client.lock("order:8"):
            busy = workers.post("/try/8")
        assert (busy.status_code, busy.headers["Retry-After"]) == (409, "1")

        assert len(workers.leaders()) == 1
        os.kill(workers.leaders()[0], signal.SIGKILL)
        poll_until(lambda: len(workers.leaders()) == 2, 60)
        assert workers.leaders()[0] != workers.leaders()[1]
        workers.stop()
        assert workers.notes()[-1][0] == "stop"
        left = [
            holding for holding in client.inspect() if holding.state != "cooling"
        ]  # an election shows its last term
        assert left == []  # handed over, not left to expire
