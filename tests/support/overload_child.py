"""Acquires and releases over many connections for a while, as fast as the server answers: `overload_child.py PORT
CONNECTIONS SECONDS`. Prints how many answers had which status, as JSON. A process of its own: a test that measures how
long renewals take must not wait for it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from harness.servers.http_load import connections, http_request, run_requests


def main(port: int, count: int, seconds: float) -> None:
    end, statuses = time.monotonic() + seconds, Counter[str]()
    pairs = []
    for number in range(count):
        lease = {"name": f"load/{number}", "id": f"{number:032x}"}
        pairs.append([http_request(f"/v1/{verb}", json.dumps(lease).encode()) for verb in ("acquire", "release")])
    turns = [0] * count

    def next_request(number: int) -> bytes | None:
        turns[number] += 1
        return pairs[number][turns[number] % 2] if time.monotonic() < end else None

    def count_status(_number: int, answer: bytes, _seconds: float) -> None:
        statuses[answer[9:12].decode()] += 1

    with connections(port, count) as opened:
        run_requests(opened, next_request, count_status)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
