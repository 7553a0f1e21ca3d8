"""What a server must endure for long: fuzzed requests, more load than it can serve, and hours of work."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from harness.rigs.redis import single_server
from harness.servers.http_load import Connection, connections, http_request, resident_bytes, run_requests
from harness.servers.lock_server import LockServer
from leasehold.server.app import ROUTES
from tests.support.paths import ROOT, SUPPORT
from tests.support.timing import check_elapsed

MIB = 1024 * 1024


@contextmanager
def started(url="memory://", *arguments):
    server = LockServer(url, *arguments).start()
    try:
        yield server
    finally:
        server.kill()


# -- fuzzed requests

VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        0.1,
        -0.0,
        1e308,
        2**53,
        2**64,
        10**30,
        "",
        "x",
        "\0",
        "\u202e",
        "é" * 300,
        "..",
        "/",
    ),
    *("a" * 255, "a" * 256, "0" * 32, "z" * 128, [], [[]], {}, {"a": {"b": []}}, ["x"] * 50, "NaN", "1e5", "-1"),
]
LITERALS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"\xff\xfe", b'"\\ud800"', b"[" * 300, b"{" * 300, b"\0"]
MEMBERS = {
    "/v1/acquire": [
        "namespace",
        "name",
        "id",
        "ttl",
        "wait",
        "limit",
        "mode",
        "delay",
        "min_hold",
        "holder",
        "purpose",
    ],
    "/v1/renew": ["namespace", "name", "id", "token", "ttl"],
    "/v1/release": ["namespace", "name", "id"],
    "/v1/break": ["namespace", "name", "token", "reason"],
}
CLAIM = ["namespace", "name", "id", "id_hash", "ttl", "mode", "kind", "limit", "delay", "min_hold", "queue", "token"]
VERBS = ["attempt", "renew", "release", "decline", "break", "inspect", "ping", "other"]
QUERIES = ["namespace", "prefix", "name", "limit", "cursor", "other"]


class Fuzzer:
    """Requests that are valid but for some parts. Names and ids come from a few, so that they meet."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def good(self, member):
        rng = self.rng
        return {
            "namespace": rng.choice(["", "shop"]),
            "name": f"orders/{rng.randrange(30)}",
            "id": f"{rng.randrange(100):032x}",
            "id_hash": f"{rng.randrange(100):032x}",
            "ttl": rng.choice([0.05, 0.5]),  # what is left behind expires soon
            "wait": rng.choice([0, 0.01]),
            "limit": rng.choice([1, 2]),
            "mode": rng.choice(["exclusive", "shared"]),
            "kind": rng.choice(["lock", "semaphore"]),
            "queue": rng.random() < 0.3,
            "token": rng.randrange(1000),
        }.get(member, 0 if member in ("delay", "min_hold") else "x")

    def members(self, known):
        rng = self.rng
        made = {member: self.good(member) for member in known if rng.random() < 0.9}
        for member in known:
            if member not in ("ttl", "delay", "min_hold") and rng.random() < 0.1:  # a day's ttl would be kept for a day
                made[member] = rng.choice(VALUES)
        if rng.random() < 0.05:
            made[rng.choice(["other", "", "\0"])] = rng.choice(VALUES)
        return made

    def body(self, path):
        rng = self.rng
        if path == "/v1/calls":
            made = [
                {"do": rng.choice(VERBS), "claim": self.members(CLAIM), "claims": [self.members(CLAIM)], "name": "x"}
                for _ in range(rng.randrange(4))
            ]
        elif path == "/v1/renew-many":
            made = {"leases": [self.members(MEMBERS["/v1/renew"]) for _ in range(rng.randrange(4))]}
        else:
            made = self.members(MEMBERS[path])
        body = json.dumps(made if rng.random() < 0.97 else rng.choice(VALUES)).encode()
        if rng.random() < 0.1:
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice([*LITERALS, rng.randbytes(3)]) + body[at + rng.randrange(3) :]
        return body

    def request(self):
        rng = self.rng
        path = rng.choice([path for path in ROUTES if path not in ("/v1/stream", "/v1/events")])
        headers = []
        if rng.random() < 0.2:
            name = rng.choice(["Leasehold-Client", "Leasehold-Within", "X-Request-Id", "traceparent", "Authorization"])
            headers.append(f"{name}: {rng.choice(['', 'x', '-1', 'nan', '0.001', '5', 'Bearer lh_a_b', 'y' * 200])}")
        if "POST" in ROUTES[path]:
            return http_request(path, self.body(path), *headers)
        query = "&".join(
            f"{rng.choice(QUERIES)}={quote(str(rng.choice(VALUES)), errors='surrogatepass')}"
            for _ in range(rng.randrange(3))
        )
        method = rng.choice(["GET", "GET", "GET", "DELETE", "PUT"])
        where = rng.choice([path, path, path + "x"]) + (f"?{query}" if query else "")
        return "\r\n".join([f"{method} {where} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


@pytest.mark.faults
def test_100_000_fuzzed_requests_get_no_5xx_and_leave_no_memory():
    """Also no hang: the generator gives up after a minute without an answer."""
    fuzzer, statuses, failed = Fuzzer(1), Counter(), []
    with started("memory://", "--limits-wait", "0.05") as server, connections(server.port, 16) as opened:
        sent = [b""] * len(opened)

        def run(count):
            left = [count]

            def next_request(number):
                left[0] -= 1
                sent[number] = fuzzer.request()
                return sent[number] if left[0] >= 0 else None

            def check(number, answer, _seconds):
                statuses[answer[9:10]] += 1
                if answer[9:10] == b"5" and len(failed) < 5:
                    failed.append((sent[number][:600], answer[:600]))
                if b"\r\nconnection: close" in answer.lower():
                    opened[number].close()
                    opened[number] = Connection(server.port)

            run_requests(opened, next_request, check)

        run(20_000)
        before = resident_bytes(server.pid)
        run(80_000)
        grown = resident_bytes(server.pid) - before
    assert not failed
    assert sum(statuses.values()) == 100_000
    assert min(statuses[b"2"], statuses[b"4"]) > 10_000, "both kinds of requests are among them"
    assert grown < 10 * MIB
    print(dict(statuses), f"{grown / MIB:.1f} MiB more")


# -- more load than it can serve


@pytest.mark.faults
def test_renewals_are_quick_and_none_is_lost_at_twice_the_capacity():
    """A hundred callers that ask again as soon as they are answered: a few suffice to keep the server busy."""
    url = f"redis://127.0.0.1:{single_server()[0].port}"
    with started(url, "--limits-calls", "60") as server, connections(server.port, 20) as opened:
        leases = []
        for number in range(100):
            lease = {"namespace": os.urandom(4).hex(), "name": f"held/{number}", "id": os.urandom(16).hex(), "ttl": 30}
            answer = opened[0].ask(http_request("/v1/acquire", json.dumps(lease).encode()))
            token = json.loads(answer.partition(b"\r\n\r\n")[2])["token"]
            leases.append(http_request("/v1/renew", json.dumps({**lease, "token": token}).encode()))
        load = subprocess.Popen(
            [sys.executable, SUPPORT / "overload_child.py", str(server.port), "100", "5"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )
        times, lost, turn = [], [], 0
        while load.poll() is None:
            renewal = leases[turn % len(leases)]
            began = time.perf_counter()
            answer = opened[turn % len(opened)].ask(renewal)
            times.append(time.perf_counter() - began)
            turn += 1
            if not answer.startswith(b"HTTP/1.1 200"):
                lost.append(answer)
            time.sleep(0.01)
        statuses = json.loads(load.stdout.read())
        load.stdout.close()
    assert not lost
    assert set(statuses) <= {"200", "409", "503"}, statuses
    assert statuses["200"] > 100
    p99 = statistics.quantiles(times, n=100)[98]
    print(statuses, f"renewal p50 {statistics.median(times) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    check_elapsed(time.monotonic() - p99, 0.1, "p99 of renewals")


# -- for long


@pytest.mark.faults
def test_memory_of_a_server_does_not_grow_with_its_work():
    """Ten minutes of acquires, waits, renewals and releases under ever new names and ids."""
    seconds, rng = float(os.environ.get("LEASEHOLD_SOAK", "600")), random.Random(1)
    with started() as server, connections(server.port, 8) as opened:

        def work(until):
            def next_request(number):
                if time.monotonic() > until:
                    return None
                name, claim = f"soak/{rng.randrange(10**9)}", os.urandom(16).hex()
                body = {"name": rng.choice([name, "soak/hot"]), "id": claim, "ttl": 1, "wait": rng.choice([0, 0.05])}
                calls = [{"do": "attempt", "claim": {"name": name, "id": claim, "ttl": 1, "queue": True}}]
                path, sent = rng.choice([("/v1/acquire", body), ("/v1/calls", calls)])
                return http_request(path, json.dumps(sent).encode(), f"Leasehold-Client: c{number}")

            return run_requests(opened, next_request)

        work(time.monotonic() + seconds / 4)
        before = resident_bytes(server.pid)
        answered = work(time.monotonic() + seconds)
        grown = resident_bytes(server.pid) - before
    print(f"{answered} requests, {grown / MIB:.1f} MiB more")
    assert grown < 10 * MIB
