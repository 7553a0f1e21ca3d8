"""What a lock server costs: CPU per request, pairs and hand-offs, and waiters. `python -m bench server`.

All figures are CPU time, which other load on the machine disturbs least. CPU per verb is that of the server's process,
against a bare ASGI application on the same uvicorn that reads bodies and sends answers of the same size. Pairs and
hand-offs count client, server and engine together, against the same engine without a server. All cases of a part run in
turn in every round, and ratios are taken within a round.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.cases import Notes, Part, Table
from harness.servers.http_load import (
    Connection,
    connections,
    cpu_seconds,
    http_request,
    resident_bytes,
    run_requests,
)
from harness.servers.lock_server import LockServer
from harness.servers.redis import RedisServer
from leasehold import Client
from leasehold.cli.bench.measurement import BenchResult

CONNECTIONS: Final = 16
VERBS: Final = 2_000  # of one case in one round
PAIRS: Final = 200
WAITERS: Final = 10_000
WAITED_NAMES: Final = 100
STEP: Final = 500  # that queue before the next do
FILL_SECONDS: Final = 120.0  # in which all queue
IDLE_SECONDS: Final = 15.0  # longer than the interval at which waiters re-check
IDLE_SLICES: Final = 3  # in each of which no waiter expires
NO_LIMITS: Final = ("--limits-calls", "1000000", "--limits-calls-per-namespace", "0")

_NUMBERS: Final = itertools.count()


class EchoServer(LockServer):
    """A bare ASGI application on the uvicorn of the lock server: the least that an HTTP server in Python costs."""

    def command(self) -> Sequence[str]:
        return [sys.executable, str(Path(__file__).with_name("server_echo.py")), str(self.port)]


class _Case(NamedTuple):
    name: str
    server: LockServer
    verbs: int  # of one request
    requests: Callable[[int], list[bytes]]  # a number of them, for one connection, in order


def parts(rounds: int) -> Iterator[Part]:
    yield cpu_per_verb(rounds)
    yield from against_direct_engines(rounds)
    yield waiters()


# -- CPU per verb


def cpu_per_verb(rounds: int) -> Table:
    with ExitStack() as stack:
        lock_server, echo = (
            stack.enter_context(started(each))
            for each in (LockServer("memory://", *NO_LIMITS), EchoServer("memory://"))
        )
        cases = [
            _Case("bare ASGI echo of equal size", echo, 1, _pairs),
            _Case("acquire and release", lock_server, 1, _pairs),
            _Case("renew", lock_server, 1, _renewals(lock_server)),
            *(_Case(f"calls in batches of {size}", lock_server, size, _batches(size)) for size in (1, 16, 128)),
        ]
        measured = {case.name: partial(_cpu_of, case) for case in cases}
        return _table("CPU of the server per verb, memory behind it", measured, rounds)


def _table(title: str, cases: Mapping[str, Callable[[], float]], rounds: int) -> Table:
    """Each case returns seconds of CPU time. The first is the base, and the first round warms up."""
    names = list(cases)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            seconds = cases[name]()
            if number:
                found[name].append(seconds)
    results = []
    for name in names:
        ratios = [own / base for own, base in zip(found[name], found[names[0]], strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else (ratios[0], ratios[0])
        micros = statistics.median(found[name]) * 1e6
        results.append(BenchResult(name, micros, statistics.median(ratios), low, high))
    return Table(title, results)


def _cpu_of(case: _Case) -> float:
    each = max(1, VERBS // CONNECTIONS // case.verbs)
    todo = [iter(case.requests(each)) for _ in range(CONNECTIONS)]

    def check(_number: int, answer: bytes, _seconds: float) -> None:
        if b" 200 " not in answer[:15] or b'"problem"' in answer:
            raise AssertionError(answer[:300])

    with connections(case.server.port, CONNECTIONS) as opened:
        before = cpu_seconds(case.server.pid)
        answered = run_requests(opened, lambda number: next(todo[number], None), check)
        return (cpu_seconds(case.server.pid) - before) / (answered * case.verbs)


def _pairs(count: int) -> list[bytes]:
    made = []
    for _ in range(count // 2 + 1):
        lease = {"name": f"orders/{next(_NUMBERS)}", "id": f"{next(_NUMBERS):032x}"}
        made += [
            http_request("/v1/acquire", json.dumps({**lease, "ttl": 30}).encode()),
            http_request("/v1/release", json.dumps(lease).encode()),
        ]
    return made


def _renewals(server: LockServer) -> Callable[[int], list[bytes]]:
    def make(count: int) -> list[bytes]:
        lease = {"name": f"orders/{next(_NUMBERS)}", "id": f"{next(_NUMBERS):032x}"}
        with connections(server.port, 1) as (connection,):
            answer = connection.ask(http_request("/v1/acquire", json.dumps({**lease, "ttl": 300}).encode()))
        token = json.loads(answer.partition(b"\r\n\r\n")[2])["token"]
        return [http_request("/v1/renew", json.dumps({**lease, "token": token, "ttl": 300}).encode())] * count

    return make


def _batches(size: int) -> Callable[[int], list[bytes]]:
    def make(count: int) -> list[bytes]:
        made = []
        for _ in range(count // 2 + 1):
            claims = [
                {"name": f"orders/{next(_NUMBERS)}", "id": f"{next(_NUMBERS):032x}", "ttl": 30} for _ in range(size)
            ]
            for verb in ("attempt", "release"):
                body = json.dumps([{"do": verb, "claim": claim} for claim in claims]).encode()
                made.append(http_request("/v1/calls", body, "Leasehold-Client: bench"))
        return made

    return make


# -- pairs and hand-offs


def against_direct_engines(rounds: int) -> Iterator[Table]:
    for name, engine in (("memory", None), ("redis", RedisServer().start())):
        with ExitStack() as stack:
            if engine is not None:
                stack.callback(engine.kill)
            url = f"redis://127.0.0.1:{engine.port}" if engine is not None else "memory://bench"
            server, echo = (stack.enter_context(started(each)) for each in (LockServer(url), EchoServer(url)))
            connection = stack.enter_context(connections(echo.port, 1))[0]
            through, behind = f"http://127.0.0.1:{server.port}", [engine.pid] if engine is not None else []
            cases = {
                "two bare round trips": _cpu_of_all(_round_trips(connection), [echo.pid]),
                "pair through a server": _cpu_of_all(_client_pairs(stack, through), [server.pid, *behind]),
                f"pair, {name} itself": _cpu_of_all(_client_pairs(stack, url), behind),
            }
            yield _table(f"acquire and release, {name}: CPU of client, server and engine", cases, rounds)
            cases = {
                f"{name} itself": _cpu_of_all(_hand_offs(stack, url), behind),
                "through a server": _cpu_of_all(_hand_offs(stack, through), [server.pid, *behind]),
            }
            yield _table(f"hand-off between two clients, {name}: CPU of clients, server and engine", cases, rounds)


def _cpu_of_all(run: Callable[[int], None], pids: Sequence[int]) -> Callable[[], float]:
    """CPU time of one operation: of this process, which is the client, and of these."""

    def measure() -> float:
        before = time.process_time() + sum(map(cpu_seconds, pids))
        run(PAIRS)
        return (time.process_time() + sum(map(cpu_seconds, pids)) - before) / PAIRS

    return measure


def _round_trips(connection: Connection) -> Callable[[int], None]:
    requests = _pairs(2)[:2]

    def run(times: int) -> None:
        for _ in range(times):
            for request in requests:
                connection.ask(request)

    return run


def _client_pairs(stack: ExitStack, url: str) -> Callable[[int], None]:
    lock = stack.enter_context(Client(url)).lock("bench/pair", ttl=300)

    def run(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    return run


def _hand_offs(stack: ExitStack, url: str) -> Callable[[int], None]:
    """Two clients take turns: each acquires again at once, so every grant is a hand-off."""
    locks = [stack.enter_context(Client(url)).lock("bench/hand-off", ttl=300, wait=60) for _ in range(2)]

    def run(times: int) -> None:
        def take_turns(number: int) -> None:
            for _ in range(max(1, times // 2)):
                with locks[number]:
                    pass

        threads = [threading.Thread(target=take_turns, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


# -- waiters


def waiters() -> Notes:
    lines = [_waiters_by("stream", _ByStream), _waiters_by("long-poll", _ByLongPoll)]
    return Notes(f"waiters for {WAITED_NAMES} names, memory behind the server", lines)


def _waiters_by(how: str, kind: type[_ByStream | _ByLongPoll]) -> str:
    """They queue step by step. On a machine too busy to queue all in time there are fewer: the line says how many."""
    flags = [*NO_LIMITS, "--limits-connections", str(WAITERS + 100), "--limits-wait", "600"]
    with started(LockServer("memory://", *flags)) as server, connections(server.port, 1) as (first,):
        for number in range(WAITED_NAMES):
            body = {"name": f"orders/{number}", "id": f"{number:032x}", "ttl": 3600}
            first.ask(http_request("/v1/acquire", json.dumps(body).encode()))
        before, until = resident_bytes(server.pid), time.monotonic() + FILL_SECONDS
        with closing(kind(server)) as waiting:
            count = 0
            while count < WAITERS and time.monotonic() < until:
                waiting.add(min(STEP, WAITERS - count))
                count = _await_parked(first, count + STEP, until)
                print(f"by {how}: {count:,} of {WAITERS:,} wait", file=sys.stderr, flush=True)
                waiting.beat()
            grown, used = resident_bytes(server.pid) - before, 0.0
            for _ in range(IDLE_SLICES):
                waiting.beat()
                began = cpu_seconds(server.pid)
                time.sleep(IDLE_SECONDS / IDLE_SLICES)
                used += cpu_seconds(server.pid) - began
    return (
        f"{count:,} by {how}: {grown / count / 1024:.1f} KiB each, {grown >> 20} MiB in all; "
        f"{used / IDLE_SECONDS:.1%} of a core while nothing happens"
    )


def _claim(number: int) -> dict[str, object]:
    return {"name": f"orders/{number % WAITED_NAMES}", "id": f"{1000 + number:032x}", "ttl": 60}


class _ByStream:
    """Waiters of one client, which the server wakes by its stream."""

    def __init__(self, server: LockServer) -> None:
        self._stream, self._connection = Connection(server.port), Connection(server.port)
        self._claims: list[dict[str, object]] = []
        self._beat_at = time.monotonic()
        self._stream.sock.sendall(b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nLeasehold-Client: bench\r\n\r\n")

    def add(self, count: int) -> None:
        for _ in range(0, count, 100):
            more = [{**_claim(len(self._claims) + number), "queue": True} for number in range(100)]
            self._ask([{"do": "attempt", "claim": claim} for claim in more])
            self._claims += more
            self.beat()

    def beat(self) -> None:
        """Keep all in their queues, as their client does every 5 s."""
        if time.monotonic() > self._beat_at + 4:
            for start in range(0, len(self._claims), 500):
                self._ask([{"do": "renew", "claims": self._claims[start : start + 500]}])
            self._beat_at = time.monotonic()

    def _ask(self, calls: list[dict[str, object]]) -> None:
        self._connection.ask(http_request("/v1/calls", json.dumps(calls).encode(), "Leasehold-Client: bench"))

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


class _ByLongPoll:
    """Waiters with a request each, which the server keeps in their queues."""

    def __init__(self, server: LockServer) -> None:
        self._port = server.port
        self._opened: list[Connection] = []

    def add(self, count: int) -> None:
        for _ in range(count):
            connection = Connection(self._port)
            body = {**_claim(len(self._opened)), "wait": 600}
            self._opened.append(connection)
            connection.send(http_request("/v1/acquire", json.dumps(body).encode()))

    def beat(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        for connection in self._opened:
            connection.close()


def _await_parked(connection: Connection, wanted: int, until: float) -> int:
    """How many are in their queues: `wanted`, or fewer when the time is over."""
    while True:
        page = connection.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        count = int(float(page.partition(b'kind="parked"} ')[2].split(b"\n", 1)[0]))
        if count >= min(wanted, WAITERS) or (count and time.monotonic() > until):
            return count
        time.sleep(0.2)


@contextmanager
def started(server: LockServer) -> Iterator[LockServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()
