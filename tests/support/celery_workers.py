"""Real workers and beats of `celery_shop`, with a real Redis as their broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from harness.rigs import postgresql
from harness.rigs.redis import single_server
from tests.support.celery_shop import make_app
from tests.support.paths import child_environment


class Shop:
    """A folder, a broker's queue and a namespace of locks of its own."""

    def __init__(self, folder: Path, engine: str, **more: Any) -> None:
        self.folder = folder
        (broker,) = single_server()
        redis, prefix = f"redis://127.0.0.1:{broker.port}", uuid.uuid4().hex
        url = {"redis": redis, "sqlite": f"sqlite://{folder}/locks.db"}.get(engine) or postgresql.server().url()
        self._settings = {
            "broker_url": redis,
            "result_backend": redis,
            "broker_transport_options": {"global_keyprefix": prefix},
            "result_backend_transport_options": {"global_keyprefix": prefix},
            "leasehold": {"url": url, "namespace": prefix, "ttl": 15},
            **more,
        }
        self.app: Celery = make_app(self._settings)
        self.queue = lambda: [json.loads(text) for text in broker.ask("LRANGE", f"{prefix}celery", 0, -1)]

    @contextmanager
    def run(self, *arguments: str, count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Processes of `celery`, ended by TERM."""
        command = [sys.executable, "-m", "celery", "-A", "tests.support.celery_shop", *arguments]
        environment = child_environment(SHOP=json.dumps(self._settings))
        environment.pop("LEASEHOLD_URL", None)
        with open(self.folder / "output", "ab") as output:
            processes = [
                subprocess.Popen(command, cwd=self.folder, env=environment, stdout=output, stderr=output)
                for _ in range(count)
            ]
        try:
            yield processes
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)

    def workers(self, pool: str, *, count: int = 1) -> Any:
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        return self.run("worker", "-P", pool, "-c", "4", "-n", f"{os.urandom(4).hex()}@%h", *quiet, count=count)

    def send(self, task: str, *args: object, **options: Any) -> Any:
        return self.app.tasks[task].apply_async(args, **options)

    def notes(self, kind: str = "") -> list[list[str]]:
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split() for line in lines if line.startswith(kind)]

    def output(self) -> str:
        return (self.folder / "output").read_text()
