"""A process that follows an approach, and reports in JSON lines: `python -m comparison.worker APPROACH URLS
ACCOUNT_DB PARENT`."""

from __future__ import annotations

import json
import sys
import time

from comparison.approaches import APPROACHES
from leasehold.cli.run.parent_death import die_with_parent


def say(message: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"word": message, **facts}) + "\n")
    sys.stdout.flush()


def main(name: str, urls: str, account_db: str, parent: str) -> None:
    die_with_parent(int(parent))
    approach = APPROACHES[name](json.loads(urls), account_db)
    began = time.monotonic()
    value = approach.acquire_and_read()
    say("holds", waited=time.monotonic() - began)
    sys.stdin.readline()
    try:
        accepted = approach.write(value + 1)
    except Exception as error:  # of any driver: the write failed, and the process knows it
        say("done", accepted=False, why=repr(error))
        return
    say("done", accepted=accepted, why="" if accepted else "stale")
    approach.release()
    approach.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
