"""Several workers of one server: they share the sockets, and pass wake-ups on to each other."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import leasehold
from leasehold.engines.remote.wire import Lost
from leasehold.server.feed import Feed
from leasehold.server.workers import Worker, WorkerRelay
from tests.support import bare_service, probe_server
from tests.support.running_server import RunningServer, in_loop, poll, running

WORKERS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running("--workers", str(WORKERS), url=f"sqlite://{tmp_path_factory.mktemp('locks')}/locks.db") as server:
        yield server


def workers_of(server):
    return [
        int(pid) for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ]


def attempt(server, name, claim_id, client):
    claim = {"name": name, "id": claim_id, "ttl": 60, "queue": True}
    (answer,) = server.post("/v1/calls", [{"do": "attempt", "claim": claim}], headers={"Leasehold-Client": client}).json
    return answer


def test_every_worker_hears_a_client_whose_stream_is_at_one(server, name, new_id):
    server.post("/v1/acquire", {"name": name, "id": new_id(), "ttl": 60})
    with server.stream("/v1/stream", headers={"Leasehold-Client": "heard"}) as stream:
        stream.wait_for("hello")
        claim_id = new_id()
        for _ in range(5 * WORKERS):  # each over its own connection, to any worker
            poll(lambda: attempt(server, name, claim_id, "heard")["heard"])
    poll(lambda: not attempt(server, name, claim_id, "heard")["heard"])


def test_wakeup_reaches_the_worker_that_has_the_stream(server, name, new_id):
    holder = new_id()
    server.post("/v1/acquire", {"name": name, "id": holder, "ttl": 60})
    with server.stream("/v1/stream", headers={"Leasehold-Client": "woken"}) as stream:
        stream.wait_for("hello")
        claim_id = new_id()
        for _ in range(5):
            poll(lambda: attempt(server, name, claim_id, "woken")["heard"])
        server.post("/v1/release", {"name": name, "id": holder})
        stream.wait_for('"wakeup"')
        assert "grant" in attempt(server, name, claim_id, "woken")
    server.post("/v1/release", {"name": name, "id": claim_id})


def test_events_of_all_workers_are_shown(server, name, new_id):
    with server.stream(f"/v1/events?prefix={name}") as events:
        assert events.answer.status == 200
        # Each over its own connection, to any worker. The first may come before all workers know of the watcher.
        for number in range(200):
            server.post("/v1/acquire", {"name": f"{name}/{number}", "id": new_id(), "ttl": 60})
        with_all = [f'"name":"{name}/{number}"' for number in range(150, 200)]
        for text in with_all:
            events.wait_for(text)


def shown_by_every_worker(server, path, expected):
    """Each request over its own connection, to any worker."""
    return all(expected(server.get(path).json) for _ in range(10 * WORKERS))


def test_every_worker_shows_the_same_history_also_a_new_one(server, name, new_id):
    """Each event once, whichever worker served its request, also after a worker was replaced."""
    tokens = []
    for _ in range(8):
        claim = {"name": name, "id": new_id(), "namespace": "history"}
        tokens.insert(0, server.post("/v1/acquire", claim).json["token"])
        assert server.post("/v1/release", claim).json == {"released": True}

    def whole(answer):
        return [(grant["token"], grant["end"]) for grant in answer["grants"]] == [(each, "released") for each in tokens]

    def counted(answer):
        return answer["stats"]["total"]["counts"].get("acquires") == {"granted direct": 8}

    history, stats = f"/v1/history?namespace=history&name={name}", "/v1/stats?namespace=history"
    poll(lambda: shown_by_every_worker(server, history, whole))
    assert shown_by_every_worker(server, stats, counted)
    killed = workers_of(server)[0]
    os.kill(killed, signal.SIGKILL)
    poll(lambda: len(now := workers_of(server)) == WORKERS and killed not in now)

    def by_all():
        try:
            return all(shown_by_every_worker(server, *each) for each in ((history, whole), (stats, counted)))
        except OSError:  # a connection that the killed worker had accepted
            return False

    poll(by_all)


def test_clients_wait_and_hand_over_through_workers(server):
    url = f"http://127.0.0.1:{server.port}"
    with leasehold.Client(url) as first, leasehold.Client(url) as second:
        for _ in range(10):
            lease = first.lock("hand-over", ttl=30).acquire()
            lease.release()
            with second.lock("hand-over", ttl=30, wait=30):
                pass


def test_worker_that_is_killed_is_replaced_and_no_lease_is_lost(server, name, new_id):
    claim_id = new_id()
    lease = server.post("/v1/acquire", {"name": name, "id": claim_id, "ttl": 60}).json
    killed = workers_of(server)[0]
    os.kill(killed, signal.SIGKILL)
    poll(lambda: len(now := workers_of(server)) == WORKERS and killed not in now)
    renewal = {"name": name, "id": claim_id, "token": lease["token"], "ttl": 60}

    def renewed():
        try:
            return server.post("/v1/renew", renewal).status == 200
        except OSError:  # a connection that the killed worker had accepted
            return False

    poll(renewed)


def greeted_again(stream):
    """Whether the stream begins anew; False: it ends."""
    for _ in range(8):  # 40 s: something comes every 5 s
        stream.text = ""
        try:
            stream.wait_for("\n\n")
        except (AssertionError, OSError, http.client.HTTPException):  # it was at the worker that was killed
            return False
        if "hello" in stream.text:
            return True
    raise AssertionError("no waiter of this client learnt that it must attempt again")


def test_streams_begin_anew_when_another_worker_is_replaced(server):
    """The worker that ended may have been the one to wake a waiter whose stream is at another."""

    def keeps_its_stream():
        with server.stream("/v1/stream", headers={"Leasehold-Client": "greeted"}) as stream:
            stream.wait_for("\n\n")
            killed = workers_of(server)[0]
            os.kill(killed, signal.SIGKILL)
            poll(lambda: len(now := workers_of(server)) == WORKERS and killed not in now)
            return greeted_again(stream)

    poll(keeps_its_stream)


@contextlib.asynccontextmanager
async def two_workers():
    """The services of two workers in one loop, with relays. One reads only while the other waits, so it takes a few
    hundred datagrams at a time."""
    async with bare_service.serving() as one, bare_service.serving() as other:
        boxes = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for sock in (sock for box in boxes for sock in box):
                stack.enter_context(sock).setblocking(False)
            for number, service in enumerate((one, other)):
                worker = Worker(number, boxes[number][0], [outbox for _, outbox in boxes], -1, -1)
                service.relay = WorkerRelay(worker, service, Feed())
                service.relay.start()
                stack.callback(service.relay.close)
            yield one, other


@pytest.mark.parametrize("most", [20_000, 50])
@in_loop
async def test_worker_hears_of_all_streams_however_many_begin_at_once(monkeypatch, most):
    """Of a thousand streams that ended at once, the other worker kept hundreds for ever."""
    monkeypatch.setattr(*probe_server.MAX_UNSENT, most)
    clients = [("anyone", f"client-{number}") for number in range(1000)]
    async with two_workers() as (one, other):
        streams = {client: one.open_stream(client) for client in clients}
        await bare_service.until(lambda: all(map(other.can_wake, clients)))
        for client in clients[1:]:
            one.close_stream(client, streams[client])
        await bare_service.until(lambda: not any(map(other.can_wake, clients[1:])))
        assert other.can_wake(clients[0])


@in_loop
async def test_notices_of_many_breaks_reach_the_worker_that_has_the_stream():
    client = ("anyone", "client")
    async with two_workers() as (one, other):
        stream = other.open_stream(client)
        await bare_service.until(lambda: one.can_wake(client))
        for number in range(1000):
            one.relay.notify(client, Lost(f"{number:032x}"))
        found = set()

        async def all_came():
            found.update(each for each in await stream.take(1) if isinstance(each, Lost))
            return len(found) == 1000

        await bare_service.until(all_came)


def test_hangup_reaches_workers_and_ends_none(server):
    before = workers_of(server)
    server.process.send_signal(signal.SIGHUP)
    assert server.get("/readyz").status == 200
    assert workers_of(server) == before


def test_workers_end_with_exit_0(tmp_path):
    server = RunningServer("--workers", "2", url=f"sqlite://{tmp_path}/locks.db")
    pids = workers_of(server)
    assert len(pids) == 2
    assert server.stop() == 0
    assert not [pid for pid in pids if _runs(pid)]


def test_worker_that_cannot_start_ends_the_server_with_78(tmp_path):
    (tmp_path / "locks.db").write_text("this is no database, and long enough to be looked at " * 100)
    program = [sys.executable, "-m", "leasehold", "-u", f"sqlite://{tmp_path}/locks.db", "serve"]
    done = subprocess.run(
        [*program, "--workers", "2", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert "locks.db" in done.stderr
    assert "listening" not in done.stderr


def test_signals_in_quick_succession_end_all_workers(tmp_path):
    server = RunningServer("--workers", "2", url=f"sqlite://{tmp_path}/locks.db")
    pids = workers_of(server)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        server.process.send_signal(number)
    assert server.stop() == 0
    assert not [pid for pid in pids if _runs(pid)]


def test_workers_end_when_their_parent_is_killed(tmp_path):
    server = RunningServer("--workers", "2", url=f"sqlite://{tmp_path}/locks.db")
    pids = workers_of(server)
    server.process.kill()
    server.process.wait(60)
    poll(lambda: not [pid for pid in pids if _runs(pid)])
    server.stop()


def _runs(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
