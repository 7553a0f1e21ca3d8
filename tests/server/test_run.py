"""The process `leasehold serve`: its start, its signals, its drain, and an engine that fails."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.servers.redis import RedisServer
from tests.support.running_server import SECONDS, RunningServer, poll, run_serve, running
from tests.support.timing import check_elapsed

FIRST, SECOND, THIRD = "first-0123456789", "second-0123456789", "third-0123456789"
NAME = "orders/42"


def acquire(server, claim_id, **fields):
    return server.post("/v1/acquire", {"name": NAME, "ttl": 60, "id": claim_id, **fields})


def release(server, claim_id):
    return server.post("/v1/release", {"name": NAME, "id": claim_id})


def queue(server):
    """Who waits, in order."""
    return [each["holder"] for each in server.get(f"/v1/locks?name={NAME}").json["queue"]]


def hang_up_has_arrived(own: int, peer: int) -> bool:
    """Whether the kernel has received a hang-up at this end of a connection: its state is CLOSE_WAIT."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[1].endswith(f":{own:04X}") and row[2].endswith(f":{peer:04X}") and row[3] == "08" for row in rows)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def in_background(call, *args, **named):
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args, **named)))
    thread.start()

    def answer():
        thread.join(SECONDS)
        return found[0]

    return answer


@contextlib.contextmanager
def redis_server():
    server = RedisServer().start()
    try:
        yield server
    finally:
        server.resume()
        server.kill()


# -- start


def test_line_on_stderr_says_where_it_listens():
    process = subprocess.Popen(
        [sys.executable, "-m", "leasehold", "-u", "memory://", "serve", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stderr.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        assert int(line.strip().rpartition(":")[2]) > 0
    finally:
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=SECONDS)
    assert (process.returncode, stdout, stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "url", "text"),
    [
        (["--workers", "2"], "memory://", "memory://"),
        ([], "zookeeper://127.0.0.1:1", "session"),
        ([], "http://127.0.0.1:1", "cannot serve another server"),
        (["--listen", "nonsense"], "memory://", "HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "memory://", "--keys"),
        (["--listen", "192.0.2.1:0", "--no-auth"], "memory://", "cannot listen on 192.0.2.1:0"),
        (["--listen", "127.0.0.1:0"], "sqlite:///nonexistent/folder/locks.db", "nonexistent"),
    ],
)
def test_setup_that_cannot_work_is_refused_with_exit_78(arguments, url, text):
    done = run_serve(*arguments, url=url)
    assert done.returncode == 78
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_packages_are_named_with_the_command_to_install_them(tmp_path):
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-m", "leasehold", "-u", "memory://", "serve"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 78
    assert 'pip install "leasehold[server]"' in done.stderr


def test_check_reads_the_settings_and_ends():
    done = run_serve("--check")
    assert (done.returncode, done.stdout) == (0, "")
    assert "valid" in done.stderr


def test_server_starts_without_its_engine_and_is_ready_later():
    with redis_server() as redis:
        redis.kill()
        with running("--call-timeout", "0.5", url=f"redis://127.0.0.1:{redis.port}") as server:
            assert server.get("/healthz").status == 200
            assert server.get("/readyz").status == 503
            redis.start()
            poll(lambda: server.get("/readyz").status == 200)
            assert acquire(server, FIRST).status == 200


# -- signals and drain


def test_hangup_never_ends_the_server():
    with running() as server:
        for _ in range(3):
            server.process.send_signal(signal.SIGHUP)
        assert acquire(server, FIRST).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_with_0(number):
    server = RunningServer()
    server.process.send_signal(number)
    assert server.process.wait(SECONDS) == 0
    assert server.stop() == 0


def test_second_signal_does_not_interrupt_the_drain():
    server = RunningServer()
    for _ in range(5):
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGTERM)
    assert server.stop() == 0


@pytest.mark.parametrize("claim_id", [SECOND, None])
def test_drain_sends_a_long_poll_away_with_its_position(tmp_path, claim_id):
    url = f"sqlite://{tmp_path}/locks.db"
    with running(url=url) as other:
        acquire(other, FIRST)
        draining = RunningServer(url=url)
        fields = {} if claim_id is None else {"id": claim_id}
        body = {"name": NAME, "ttl": 60, "wait": 50, "holder": "second", **fields}
        waiting = in_background(draining.post, "/v1/acquire", body)
        poll(lambda: queue(other) == ["second"])
        began = time.monotonic()
        assert draining.stop() == 0
        check_elapsed(began, 5)
        answer = waiting()
        assert (answer.status, answer.kind) == (503, "draining")
        assert "done" not in answer.json, "the engine was asked: the outcome is not certain"
        assert answer.headers["retry-after"] == "1"
        third = in_background(acquire, other, THIRD, wait=50, holder="third")
        poll(lambda: queue(other) == ["second", "third"])
        again = in_background(acquire, other, answer.json["id"], wait=50)
        poll(lambda: 'kind="parked"} 2' in other.get("/metrics").body.decode())
        release(other, FIRST)
        lease = again()
        assert lease.status == 200
        release(other, lease.json["id"])
        assert third().status == 200


def test_drain_ends_streams_with_moved():
    server = RunningServer()
    with server.stream("/v1/stream", headers={"Leasehold-Client": "c1"}) as stream:
        stream.wait_for("hello")
        with server.stream("/v1/events") as events:
            server.process.send_signal(signal.SIGTERM)
            assert '{"moved":true}' in stream.read_to_end()
            events.read_to_end()
    assert server.stop() == 0


def test_drain_answers_the_request_under_way():
    """An attempt that the engine has not answered yet gets its answer."""
    with redis_server() as redis:
        server = RunningServer(url=f"redis://127.0.0.1:{redis.port}")
        acquire(server, FIRST)
        redis.pause()
        waiting = in_background(release, server, FIRST)
        poll(lambda: 'call"} 1' in server.get("/metrics").body.decode())
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: refuses_connections(server))  # the drain has begun
        redis.resume()
        answer = waiting()
        assert (answer.status, answer.json) == (200, {"released": True})
        assert server.stop() == 0


def test_metrics_are_shown_while_the_engine_is_silent():
    with redis_server() as redis, running("--call-timeout", "300", url=f"redis://127.0.0.1:{redis.port}") as server:
        acquire(server, FIRST)
        redis.pause()
        assert 'in_flight{kind="call"} 0' in server.get("/metrics").body.decode()
        redis.resume()


def refuses_connections(server):
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


# -- an engine that fails


def test_silent_engine_opens_the_breaker_and_attempts_fail_at_once():
    with redis_server() as redis, running("--call-timeout", "0.3", url=f"redis://127.0.0.1:{redis.port}") as server:
        lease = acquire(server, FIRST).json
        redis.pause()
        refused = poll(lambda: (answer := acquire(server, SECOND)).json.get("done") is False and answer)
        assert (refused.status, refused.kind) == (503, "engine-unavailable")
        assert refused.headers["retry-after"] == "1"
        renewal = {"name": NAME, "id": FIRST, "token": lease["token"]}
        answer = server.post("/v1/renew", renewal)
        assert (answer.status, answer.kind) == (503, "engine-unavailable")
        assert "done" not in answer.json, "renewals pass, so the outcome is unknown"
        assert server.get("/readyz").status == 503
        redis.resume()
        assert poll(lambda: (answer := server.post("/v1/renew", renewal)).status == 200 and answer)
        assert acquire(server, SECOND).status == 409


@pytest.mark.parametrize("engine", ["redis", "sqlite"])
def test_no_answer_has_the_address_of_the_engine(engine, tmp_path):
    """Not even when the engine fails: its errors contain addresses, and stay in the log."""
    with redis_server() as redis:
        secret = "a-secret-password"
        redis.ask("CONFIG", "SET", "requirepass", secret)
        url, hidden = f"redis://:{secret}@127.0.0.1:{redis.port}", [str(redis.port), secret]
        if engine == "sqlite":
            url, hidden = f"sqlite://{tmp_path}/hidden.db", ["hidden.db", str(tmp_path)]
        with running("--call-timeout", "0.3", url=url) as server:
            answers = [acquire(server, FIRST)]
            if engine == "redis":
                redis.kill()
            else:
                os.remove(tmp_path / "hidden.db")
                os.mkdir(tmp_path / "hidden.db")
            for _ in range(2):
                answers += [
                    acquire(server, SECOND, wait=0.1),
                    release(server, FIRST),
                    server.post("/v1/renew", {"name": NAME, "id": FIRST, "token": 7}),
                    server.post("/v1/renew-many", {"leases": [{"name": NAME, "id": FIRST, "token": 7}]}),
                    server.post("/v1/break", {"name": NAME, "token": 7}),
                    server.get("/v1/locks"),
                    server.get("/v1/traits"),
                    server.get("/readyz"),
                    server.get("/metrics"),
                    server.post(
                        "/v1/calls",
                        [
                            {"do": "attempt", "claim": {"name": NAME, "id": THIRD, "ttl": 3}},
                            {"do": "renew", "claims": [{"name": NAME, "id": THIRD, "ttl": 3, "token": 7}]},
                            {"do": "release", "claim": {"name": NAME, "id": THIRD, "ttl": 3}},
                            {"do": "inspect"},
                            {"do": "ping"},
                        ],
                    ),
                ]
            for answer in answers:
                shown = answer.body.decode() + json.dumps(answer.headers)
                assert not [each for each in hidden if each in shown], shown
            assert secret not in server.output


# -- callers that hang up


def test_caller_that_hangs_up_leaves_no_waiter_without_an_id(memory_server, new_id):
    holder = new_id()
    memory_server.post("/v1/acquire", {"name": "hang-up", "ttl": 60, "id": holder})
    body = json.dumps({"name": "hang-up", "ttl": 60, "wait": 50}).encode()
    with socket.create_connection(("127.0.0.1", memory_server.port)) as connection:
        head = f"POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        locks = "/v1/locks?name=hang-up"
        poll(lambda: memory_server.get(locks).json["queue"])
    poll(lambda: not memory_server.get(locks).json["queue"])
    memory_server.post("/v1/release", {"name": "hang-up", "id": holder})


def test_caller_that_hangs_up_keeps_its_position_with_its_own_id(memory_server, new_id):
    holder, own = new_id(), new_id()
    memory_server.post("/v1/acquire", {"name": "hang-up", "ttl": 60, "id": holder})
    body = json.dumps({"name": "hang-up", "ttl": 60, "wait": 50, "id": own, "holder": "own"}).encode()
    locks = "/v1/locks?name=hang-up"
    with socket.create_connection(("127.0.0.1", memory_server.port)) as connection:
        head = f"POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        poll(lambda: memory_server.get(locks).json["queue"])
    other = in_background(
        memory_server.post, "/v1/acquire", {"name": "hang-up", "ttl": 60, "wait": 50, "id": new_id(), "holder": "other"}
    )
    poll(lambda: [each["holder"] for each in memory_server.get(locks).json["queue"]] == ["own", "other"])
    began = time.monotonic()
    memory_server.post("/v1/release", {"name": "hang-up", "id": holder})
    lease = other()
    assert lease.status == 200, "the reservation of the caller that is gone goes to the next"
    check_elapsed(began, 2)
    memory_server.post("/v1/release", {"name": "hang-up", "id": lease.json["id"]})


# -- events


@pytest.mark.extended  # a server for each case
@pytest.mark.parametrize("where", ["open connection", "new connection"])
def test_request_of_a_caller_that_hung_up_before_it_began_is_not_run(where):
    """A server that was stopped for a while must not carry out what its callers have repeated at another server: the
    late attempt would send the wake-ups of a waiter to a server that it has left."""
    body = json.dumps({"name": NAME, "ttl": 600, "id": FIRST}).encode()
    request = b"POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with running() as server, contextlib.ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS))

        if where == "open connection":
            caller = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
            caller.request("GET", "/healthz")
            caller.getresponse().read()  # all of it: what is left unread makes the kernel reset the connection
            impatient = stack.enter_context(caller.sock)
        server.process.send_signal(signal.SIGSTOP)
        try:
            poll(lambda: is_stopped(server.process.pid))
            impatient = connect() if where == "new connection" else impatient
            impatient.sendall(request)
            port = impatient.getsockname()[1]
            impatient.close()
            poll(lambda: hang_up_has_arrived(server.port, port))
        finally:
            server.process.send_signal(signal.SIGCONT)
        # Once the server has closed its end, it has begun the request, or has dropped it because the end came with it.
        poll(lambda: not hang_up_has_arrived(server.port, port))
        assert server.get(f"/v1/locks?name={NAME}").json["holdings"] == []


def test_events_show_what_happens_through_this_server(memory_server, new_id):
    claim_id = new_id()
    with memory_server.stream("/v1/events?prefix=watched/") as events:
        memory_server.post("/v1/acquire", {"name": "other", "id": new_id()})
        lease = memory_server.post("/v1/acquire", {"name": "watched/1", "id": claim_id, "holder": "web"}).json
        events.wait_for("event: granted")
        memory_server.post("/v1/acquire", {"name": "watched/1", "id": new_id()})
        events.wait_for("event: busy")
        memory_server.post("/v1/renew", {"name": "watched/1", "id": claim_id, "token": lease["token"]})
        memory_server.post("/v1/break", {"name": "watched/1", "token": lease["token"], "reason": "it hangs"})
        events.wait_for("event: broken")
        memory_server.post("/v1/renew", {"name": "watched/1", "id": claim_id, "token": lease["token"]})
        events.wait_for("event: lost")
        events.wait_for("\n\n")
    shown = events.text
    data = [json.loads(line.removeprefix("data: ")) for line in shown.splitlines() if line.startswith("data: ")]
    assert {each["name"] for each in data} == {"watched/1"}
    assert data[0]["holder"] == "web"
    assert data[0]["token"] == lease["token"]
    assert data[2]["why"] == "it hangs"
    assert claim_id not in shown
