"""A Celery app for tests. In a worker or beat it is configured by the variable SHOP, and its tasks note what they do in
the file `log` of their folder."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery

import leasehold
from leasehold.integrations.celery import SingletonTask, singleton


def note(*values: object) -> None:
    with open("log", "a") as file:
        file.write(" ".join(map(str, values)) + "\n")


def hang_until(file: str) -> None:
    while not os.path.exists(file):
        time.sleep(0.005)


def make_app(settings: dict[str, Any]) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    task = partial(app.task, shared=False)  # not known to other apps of the process

    @task(name="enter", bind=True)
    @singleton("{name}", on_busy="wait", wait=120)
    def enter(self, name, lease):
        assert leasehold.current_lease() is lease is self.request.lease
        note("in", lease.token)
        time.sleep(0.01)  # pause: work, during which another task could enter
        note("out", lease.token)

    @task(name="hold")
    @singleton("{name}")
    def hold(name, lease, until="go"):
        note("held", lease.token)
        while lease.held and not os.path.exists(until):
            time.sleep(0.005)
        lease.check()
        return lease.token

    @task(name="skip")
    @singleton("{name}", on_busy="skip")
    def skip(name):
        note("ran", name)
        return "ran"

    @task(name="retry", bind=True, max_retries=0)
    @singleton("{name}", on_busy="retry", retry_in=0.1)
    def retry(self, name):
        note("retried", self.request.retries)
        return "ran"

    @task(name="coalesce")
    @singleton("{name}", on_busy="coalesce")
    def coalesce(name, until):
        note("began", until)
        hang_until(until)
        return until

    @task(name="send", base=SingletonTask, bind=True, max_retries=3)
    @singleton("{name}", at="send")
    def send(self, name, retries=0, until="."):
        note("sent", name, self.request.retries)
        if self.request.retries < retries:
            raise self.retry(countdown=0.05)
        hang_until(until)
        return name

    @task(name="killed", acks_late=True, reject_on_worker_lost=True)
    @singleton("{name}", ttl=8)
    def killed(name, lease):
        note("killed", lease.token)
        if not os.path.exists("killed"):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "ran"

    @task(name="pair")
    def pair(first, second):
        return [first, second]

    @task(name="tick")
    def tick():
        pass

    return app


if "SHOP" in os.environ:
    app = make_app(json.loads(os.environ["SHOP"]))
