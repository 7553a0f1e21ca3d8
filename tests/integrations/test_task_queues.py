"""The snippets for RQ, Dramatiq, huey and arq, as they are on their page, with real workers and a real Redis."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from harness.rigs.redis import single_server
from leasehold import Client
from tests.support.client_fixtures import poll_until
from tests.support.paths import ROOT, child_environment

pytestmark = pytest.mark.extended

WITHIN = 120
PAGE = ROOT / "docs" / "integrations" / "task-queues.md"

NOTE = """
import os, time

def note(*values):
    with open("log", "a") as file:
        file.write(" ".join(map(str, (*values, os.getpid()))) + "\\n")
    while not os.path.exists(f"go{values[1]}") and os.getppid() != 1:
        time.sleep(0.01)
    with open("log", "a") as file:
        file.write(f"imported {values[1]} {os.getpid()}\\n")
"""

# How a worker is started, and how a job is sent.
WORKERS = {
    "RQ": ["-m", "rq.cli", "worker", "--url", "URL", "--with-scheduler", "QUEUE"],
    "Dramatiq": ["-m", "dramatiq", "jobs", "--processes", "1", "--threads", "2", "--queues", "QUEUE"],
    "huey": ["-m", "huey.bin.huey_consumer", "jobs.huey", "-k", "process", "-w", "2"],
    "arq": ["-m", "arq", "jobs.WorkerSettings"],
}
SEND = {
    "RQ": "from redis import Redis; from rq import Queue, Retry; "
    "queue = Queue('QUEUE', connection=Redis.from_url('URL')); "
    "queue.enqueue(import_account, ACCOUNT, retry=Retry(max=200, interval=1))",
    "Dramatiq": "import_account.send(ACCOUNT)",
    "huey": "import_account(ACCOUNT)",
    "arq": "import asyncio; from arq import create_pool\n"
    "async def send():\n"
    "    await (await create_pool(WorkerSettings.redis_settings)).enqueue_job('import_account', ACCOUNT)\n"
    "asyncio.run(send())",
}


class Jobs:
    """The page's module `jobs`, in a folder, a queue and a namespace of its own."""

    def __init__(self, folder: Path, queue: str) -> None:
        (server,) = single_server()
        self.url, self.queue, self.folder = f"redis://127.0.0.1:{server.port}", queue, folder
        self.id = f"q{uuid.uuid4().hex[:12]}"
        section = PAGE.read_text().partition(f"\n## {queue}\n")[2]
        snippet = re.search(r"```python\n(.*?)```", section, re.S)[1]
        for old, new in [
            ('Client("redis://localhost")', f'Client("{self.url}", namespace="{self.id}", ttl=10)'),
            ('print("importing"', 'note("importing"'),
            ("redis://localhost", self.url),
            ('RedisHuey("shop"', f'RedisHuey("{self.id}"'),
            ("retries=20, retry_delay=5", "retries=200, retry_delay=1"),
            (
                "dramatiq.actor(min_backoff=1000",
                f'dramatiq.actor(queue_name="{self.id}", max_retries=200, min_backoff=100',
            ),
            ("defer=5", "defer=1"),
        ]:
            snippet = snippet.replace(old, new)
        (folder / "jobs.py").write_text(NOTE + snippet)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        words = {"URL": self.url, "QUEUE": self.id}
        command = [sys.executable, *(words.get(word, word) for word in WORKERS[self.queue])]
        environment = child_environment()
        environment["PYTHONPATH"] = f"{self.folder}{os.pathsep}{environment['PYTHONPATH']}"
        with open(self.folder / "output", "ab") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.processes.append(process)
        return process

    def send(self, *accounts: int) -> None:
        code = "from jobs import *\n"
        for account in accounts:
            code += SEND[self.queue].replace("URL", self.url).replace("QUEUE", self.id).replace("ACCOUNT", str(account))
            code += "\n"
        environment = child_environment()
        subprocess.run([sys.executable, "-c", code], cwd=self.folder, env=environment, check=True, timeout=WITHIN)

    def notes(self, text: str) -> list[int]:
        """The processes that noted it."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [int(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{text} ")]

    def stop(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


@pytest.fixture(params=["RQ", "Dramatiq", "huey", "arq"])
def jobs(request, tmp_path):
    if request.param == "arq" and importlib.util.find_spec("arq") is None:
        pytest.skip("arq needs redis-py below 6, which the other tests do not: `make oldest` runs this one")
    jobs = Jobs(tmp_path, request.param)
    yield jobs
    jobs.stop()


def test_jobs_of_a_queue_run_one_at_a_time_also_after_a_kill(jobs) -> None:
    jobs.start()
    jobs.start()
    with Client(jobs.url, namespace=jobs.id) as client:
        jobs.send(1, 1)
        poll_until(lambda: jobs.notes("importing 1"), WITHIN)
        jobs.send(2)  # another account
        poll_until(lambda: jobs.notes("importing 2"), WITHIN)
        (jobs.folder / "go2").touch()
        poll_until(lambda: jobs.notes("imported 2"), WITHIN)
        (killed,) = jobs.notes("importing 1")  # the other job for it is busy
        (holding,) = client.inspect("import:1", exact=True)
        assert holding.holder.pid == killed

        os.kill(killed, signal.SIGKILL)
        (jobs.folder / "go1").touch()
        jobs.send(1)  # the killed process may have had the other job in its memory
        poll_until(lambda: jobs.notes("imported 1"), WITHIN)  # after the ttl
        assert jobs.notes("imported 1")[0] != killed
        poll_until(lambda: client.inspect("import:1", exact=True) == [], WITHIN)
