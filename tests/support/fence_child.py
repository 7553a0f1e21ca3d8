"""A child process that uses a fence and reports what happened, one JSON value per line.

fence_child.py hold KIND SPEC URL TTL            acquires the lock, reads, reports the token; writes 1 after a newline
fence_child.py hold_by_key ENGINE SPEC URL NAME  the same with a fence on the lock's own key
fence_child.py hammer KIND SPEC TOKENS ROUNDS CLAIMS MANY
    MANY processes read, pause and write one more, with tokens that become stale. TOKENS: a file with the last token
    given out. CLAIMS: 0 reads without claiming the fence. Reports the calls of each process: start, end, action, token,
    whether it was accepted, and the value that it is based on.
fence_child.py create KIND SPEC ROUNDS           creates another fence table after each newline
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import sys
import time
from typing import Any

from leasehold import Client, StaleToken
from leasehold.fences import EtcdLockFence, SQLFence, ZooKeeperLockFence
from tests.support.fence_kinds import KINDS


def write_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def hold(kind: str, spec: str, url: str, ttl: str) -> None:
    events: list[Any] = []
    number = KINDS[kind](json.loads(spec))
    client = Client(url, ttl=float(ttl), on_event=events.append)
    lease = client.lock("acct/1").acquire()
    write_json({"token": lease.token, "read": number.read(lease)})
    sys.stdin.readline()
    try:
        number.write(lease, 1)
        write_json({"refused": None})
    except StaleToken as stale:
        reasons = [event.reason for event in events if event.kind == "stale_token"]
        write_json({"refused": [stale.token, stale.highest], "told": reasons, "text": str(stale)})
    number.close()
    client.close()


def hold_by_key(engine: str, spec: str, url: str, name: str) -> None:
    number = KINDS[engine](json.loads(spec))
    if engine == "etcd":
        fence: Any = EtcdLockFence(f"http://127.0.0.1:{number.spec['etcd']}", number.key, lock=name)
    else:
        fence = ZooKeeperLockFence(number.client, number.path, lock=name)
    client = Client(url, ttl=2)
    lease = client.lock(name).acquire()
    fence.read(lease)
    write_json({"token": lease.token})
    sys.stdin.readline()
    try:
        fence.write(lease, "1")
        write_json({"refused": None})
    except StaleToken as stale:
        write_json({"refused": [stale.token, stale.highest]})
    number.close()
    client.close()


def next_token(path: str) -> int:
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = int(file.read() or 0) + 1
        file.seek(0)
        file.write(str(token))
    return token


def hammer(kind: str, spec: str, tokens: str, rounds: str, claims: str, many: str) -> None:
    forked = multiprocessing.get_context("fork")  # no thread runs yet, and a new interpreter would import everything
    all_ready, reports = forked.Barrier(int(many)), forked.SimpleQueue()
    arguments = (kind, spec, tokens, int(rounds), claims == "1", all_ready, reports)
    processes = [forked.Process(target=hammer_alone, args=arguments) for _ in range(int(many))]
    for process in processes:
        process.start()
    write_json([reports.get() for _ in processes])
    for process in processes:
        process.join()


def hammer_alone(kind: str, spec: str, tokens: str, rounds: int, claims: bool, all_ready: Any, reports: Any) -> None:
    number = KINDS[kind](json.loads(spec))
    try:
        all_ready.wait(60)
        reports.put(hammer_calls(number, tokens, rounds, claims))
    except BaseException as error:  # so that neither the others nor the test wait for this process
        all_ready.abort()
        reports.put(repr(error))
        raise
    number.close()


def hammer_calls(number: Any, tokens: str, rounds: int, claims: bool) -> list[Any]:
    rng = random.Random(os.getpid())
    calls: list[Any] = []

    def call(action: str, token: int, work: Any, based_on: int | None = None) -> Any:
        began = time.monotonic()
        try:
            found, accepted = work(), True
        except StaleToken:
            found, accepted = None, False
        calls.append((began, time.monotonic(), action, token, accepted, based_on))
        return found if accepted else None

    token = 0
    for _ in range(rounds):
        if not token or rng.random() < 0.6:
            token = next_token(tokens)
        value = call("read", token, lambda token=token: number.read(token)) if claims else number.peek()
        if value is not None:
            time.sleep(rng.random() * 0.004)  # pause: others may come in between
            call("write", token, lambda token=token, value=value: number.write(token, value + 1) or True, value)
    return calls


def create(kind: str, spec: str, rounds: str) -> None:
    number = KINDS[kind](json.loads(spec))
    write_json("ready")
    for index in range(int(rounds)):
        sys.stdin.readline()
        try:
            SQLFence(number.connection, "a", table=f"created_{number.spec['run']}_{index}").create()
            write_json("created")
        except Exception as error:
            write_json(repr(error))
    number.close()


if __name__ == "__main__":
    {"hold": hold, "hold_by_key": hold_by_key, "hammer": hammer, "create": create}[sys.argv[1]](*sys.argv[2:])
