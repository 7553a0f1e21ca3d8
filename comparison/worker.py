"""A process under an approach: `python -m comparison.worker MAKER WHERE LEDGER PARENT`. It speaks in JSON lines."""

from __future__ import annotations

import json
import sys
import time

from comparison.approaches import MAKERS
from leasehold.tie import die_with


def say(word: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"word": word, **facts}) + "\n")
    sys.stdout.flush()


def main(maker: str, where: str, ledger: str, parent: str) -> None:
    die_with(int(parent))
    approach = MAKERS[maker](json.loads(where), ledger)
    began = time.monotonic()
    value = approach.enter()
    say("holds", waited=time.monotonic() - began)
    sys.stdin.readline()
    try:
        accepted = approach.write(value + 1)
    except Exception as failed:  # of whatever driver: it did not get through, and knows it
        say("done", accepted=False, why=repr(failed))
        return
    say("done", accepted=accepted, why="" if accepted else "stale")
    approach.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
