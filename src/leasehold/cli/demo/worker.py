"""A process of a demo: `python -m leasehold.cli.demo.worker DEMO ROLE`, with its facts in the environment."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from leasehold.blocking import Client
from leasehold.cli.demo import load_demo
from leasehold.cli.demo.runner import FACTS_VARIABLE, FAILED
from leasehold.cli.run.parent_death import die_with_parent
from leasehold.errors import LeaseholdError, Unavailable


class Worker:
    """What a role gets: its facts, a client, and the means to report and to wait for the runner."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        return self.facts[name]

    def client(self, **options: Any) -> Client:
        return Client(self.facts["url"], namespace=self.facts["namespace"], holder=self.facts["who"], **options)

    def report(self, event: str, text: str = "", **facts: Any) -> None:
        sys.stdout.write(json.dumps({"at": time.monotonic(), "event": event, "text": text, **facts}) + "\n")
        sys.stdout.flush()

    def wait_go(self) -> None:
        """Wait until the runner sends go."""
        sys.stdin.readline()

    def go_within(self, seconds: float) -> bool:
        """Whether the runner sends go within `seconds`."""
        return bool(select.select([sys.stdin], [], [], seconds)[0])


def main(name: str, role: str) -> None:
    worker = Worker(json.loads(os.environ.pop(FACTS_VARIABLE)))
    die_with_parent(worker.parent)  # or a process that the demo has paused would stay paused for ever
    try:
        load_demo(name).ROLES[role](worker)
    except LeaseholdError as error:
        worker.report(FAILED, reason=str(error), unavailable=isinstance(error, Unavailable))
        raise  # to stderr, which `-v` shows


if __name__ == "__main__":
    main(*sys.argv[1:])
