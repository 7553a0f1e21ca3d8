"""The lives of a client: made, pickled, closed, forked, collected, interrupted."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref

import pytest

import leasehold
from leasehold import Client, ConfigError, Event, LeaseLost, NotAcquired, Unavailable
from leasehold.recipes import client as recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_clients_of_one_shared_memory_exclude_each_other_and_private_ones_do_not() -> None:
    with Client("memory://t1") as one, Client("memory://t1") as two, Client("memory://") as alone, one.lock("a"):
        assert two.lock("a").try_acquire() is None
        with alone.lock("a"):
            pass


def test_namespaces_are_apart(bench) -> None:
    one, two = bench.client(namespace="x"), bench.client(namespace="y")
    with one.lock("a"), two.lock("a"):
        assert [holding.namespace for holding in one.inspect()] == ["x"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redys://h", r"no engine for redys://; known: .*memory://"),
        ("nonsense", "has no"),
        (7, "has no"),
        ("memory://?durable=yes", "has no option 'durable'; known options: none"),
        ("memory://?x=1&x=2", "given twice"),
        ("memory://?;;", "cannot be read"),
    ],
)
def test_bad_urls_are_refused_with_the_way_out(url, says) -> None:
    with pytest.raises(ConfigError, match=says):
        Client(url)


def test_the_url_may_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("LEASEHOLD_URL", "memory://env")
    with Client() as one, Client("memory://env") as two, one.lock("a"):
        assert two.lock("a").try_acquire() is None


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"call_timeout": -1}, {"namespace": "a\0"}, {"on_event": 3}, {"holder": 4}]
)
def test_bad_client_options_are_refused(options) -> None:
    with pytest.raises(ConfigError):
        Client("memory://", **options)


def test_third_parties_add_engines_by_entry_point(monkeypatch) -> None:
    from importlib.metadata import EntryPoint

    from leasehold import engines

    point = EntryPoint("mine", "leasehold.engines.memory:open", engines.GROUP)
    monkeypatch.setattr(engines, "entry_points", lambda group: [point] if group == engines.GROUP else [])
    with Client("mine://") as client, client.lock("a"):
        pass
    with pytest.raises(ConfigError, match=r"known: .*memory://, mine://"):
        Client("other://")


def test_repr_shows_no_password() -> None:
    from leasehold.config import ClientOptions, EngineConfig

    config = EngineConfig.parse("redis://user:hunter2@host/0?password=hunter3", 5.0)
    options = ClientOptions("redis://user:hunter2@host")
    assert "hunter" not in repr(config) + repr(options)


def test_a_client_pickles_as_configuration() -> None:
    with Client("memory://pickled", namespace="ns", ttl=7, holder="me") as client:
        again = pickle.loads(pickle.dumps(client))
        lock = pickle.loads(pickle.dumps(client.lock("a", wait=3)))
        with again, client.lock("a"):
            assert again.lock("a").try_acquire() is None
            assert again.inspect()[0].holder.label == "me"
            assert again.lock("b").options.ttl == 7
            assert (lock.name, lock.options.wait) == ("a", 3)
        lock._client.close()


def test_one_with_its_own_engine_does_not_pickle(bench) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(bench.client())


def test_close_releases_what_is_held_and_ends_the_threads(bench) -> None:
    client = bench.client()
    lease = client.lock("a", reentrant=True).acquire()
    assert client.lock("a", reentrant=True).acquire() is lease
    client.close()
    client.close()
    assert lease.state == "RELEASED"
    assert not bench.store.lines
    for use in (client.lock("a").acquire, client.inspect, client.ping, client.connect):
        with pytest.raises(ConfigError, match="this client is closed"):
            use()


def test_close_settles_what_is_owed_but_not_for_ever(bench, caplog) -> None:
    client = bench.client(call_timeout=0.5)
    lease = client.lock("a").acquire()
    bench.link.silent = True
    turning = threading.Thread(
        target=lambda: [bench.clock.turn(0.1) or threading.Event().wait(0.01) for _ in range(20)]
    )
    turning.start()
    with caplog.at_level(logging.WARNING):
        client.close()
    turning.join()
    assert "was not confirmed before close(); it lapses" in caplog.text
    assert lease.state == "RELEASED"


def test_those_in_line_are_turned_away_when_the_client_closes(bench, wait_until) -> None:
    held = bench.client().lock("a").acquire()
    client = bench.client()
    out: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock("a").acquire()
        except ConfigError as error:
            out.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: client._desk.book.waiting)
    client.close()
    waiter.join(10)
    assert out
    assert [holding.state for holding in bench.client().inspect()] == ["held"]
    held.release()


def test_a_grant_that_comes_as_the_client_closes_is_given_back(bench) -> None:
    client = bench.client()
    lock = client.lock("a")
    admit = client._desk.dog.watch

    def closing(lease, held) -> None:
        admit(lease, held)
        client._desk.closed = True

    client._desk.dog.watch = closing
    with pytest.raises(ConfigError, match="closed"):
        lock.acquire()
    client._desk.closed = False
    assert not bench.store.lines


def test_a_collected_client_leaves_no_thread_and_no_desk() -> None:
    client = Client("memory://")
    with client.lock("a"):
        pass
    desk = weakref.ref(client._desk)
    del client
    end = threading.Event()
    for _ in range(500):
        gc.collect()
        if desk() is None:
            break
        end.wait(0.01)
    assert desk() is None


def test_a_lease_outlives_its_client_object(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    gone = weakref.ref(client)
    bench.clients.remove(client)
    del client
    gc.collect()
    assert gone() is None
    for now in (1010, 1020, 1030, 1040):
        bench.clock.turn(10)
        wait_until(lambda now=now: lease._asked == now)
    assert lease.release()


def test_ping_and_connect_and_traits(bench) -> None:
    client = bench.client()
    assert client.ping() == 0.0  # by a clock that stands still
    client.connect()
    assert client.traits.fencing
    bench.link.silent = True
    with pytest.raises(Unavailable):
        client.ping()


def test_inspect_shows_holders_and_the_line(bench, wait_until) -> None:
    client = bench.client(holder="h")
    held = [client.lock("a/1", ttl=30, purpose="p").acquire(), client.semaphore("a/2", 3).acquire()]
    bench.clock.at += 2
    first, second = client.inspect("a/")
    assert (first.name, first.state, first.kind, first.holder.label, first.holder.purpose) == (
        "a/1",
        "held",
        "lock",
        "h",
        "p",
    )
    assert (first.age, first.left) == (2.0, 28.0)
    assert (second.kind, second.limit, second.slot) == ("semaphore", 3, 0)
    assert client.inspect("a/1", exact=True) == [first]
    assert client.inspect("a", exact=True) == client.inspect("b") == []
    assert {lease.fingerprint for lease in held} == {first.fingerprint, second.fingerprint}
    with pytest.raises(ConfigError):
        client.inspect(3)


@pytest.mark.parametrize("token", [None, "7", True, 1.0])
def test_break_wants_the_token_that_was_seen(bench, token) -> None:
    with pytest.raises(ConfigError, match="the number inspect"):
        bench.client().break_lock("a", token=token)


def test_events_tell_the_story(bench, wait_until) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append, holder="h")
    with client.lock("a", ttl=30) as lease:
        with pytest.raises(NotAcquired):
            bench.client(on_event=events.append).lock("a").acquire(wait=0)
        bench.clock.turn(10)
        wait_until(lambda: [event for event in events if event.kind == "renewed"])
        bench.link.silent = True
        bench.clock.turn(10)
        wait_until(lambda: [event for event in events if event.kind == "at_risk"])
        bench.link.silent = False
    other = client.lock("b").acquire()
    client.break_lock("b", token=other.token)
    wait_until(lambda: [event for event in events if event.kind == "lost"])
    kinds = [event.kind for event in events]
    assert kinds[:4] == ["attempted", "granted", "attempted", "busy"]
    assert {"renewed", "renew_failed", "at_risk", "released", "broken", "lost"} <= set(kinds)
    granted = events[1]
    assert (granted.engine, granted.name, granted.token, granted.holder) == ("own", "a", lease.token, "h")
    assert granted.fingerprint == lease.fingerprint
    assert granted.seconds is not None
    assert next(event.reason for event in events if event.kind == "lost") == "broken"


def test_waiting_is_an_event(bench, wait_until) -> None:
    events: list[Event] = []
    lease = bench.client().lock("a").acquire()
    client = bench.client(on_event=events.append)
    waiter = threading.Thread(target=lambda: client.lock("a").acquire().release())
    waiter.start()
    wait_until(lambda: [holding.state for holding in client.inspect()] == ["held", "waiting"])
    lease.release()
    waiter.join(10)
    assert [event.kind for event in events] == ["attempted", "waited", "granted", "released"]


def test_an_owed_release_is_an_event(bench) -> None:
    events: list[Event] = []
    client = bench.client(on_event=events.append)
    lease = client.lock("a").acquire()
    bench.link.silent = True
    lease.release()
    assert "owed" in [event.kind for event in events]


def test_a_failing_hook_never_breaks_a_lock(bench, caplog) -> None:
    def fails(_event: Event) -> None:
        raise RuntimeError("hook")

    with bench.client(on_event=fails).lock("a") as lease:
        assert lease.held
    assert "the on_event hook failed on attempted of a" in caplog.text


def test_errors_survive_pickling(bench) -> None:
    held = bench.client(holder="h").lock("a").acquire()
    with pytest.raises(NotAcquired) as busy:
        bench.client().lock("a").acquire(wait=0)
    held.release()
    errors = [
        busy.value,
        LeaseLost("a", reason="broken", token=3),
        Unavailable("no answer", engine="redis", seconds=5.0),
        leasehold.Unsupported("cannot", engine="e", missing=("x",)),
        leasehold.Mismatch("a", wanted="lock", found="semaphore of 2"),
        leasehold.SelfDeadlock("a", token=3),
        leasehold.StaleToken("file", token=3, highest=4),
        ConfigError("bad"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
        assert isinstance(again, leasehold.LeaseholdError)


FORK = """
import os, sys, threading, leasehold
client = leasehold.Client("memory://shared", ttl=30)
lock = client.lock("a")
with lock as lease:
    client.lock("idle").acquire(wait=0).release()
    told = []
    lease.on_lost(told.append)
    pid = os.fork()
    if pid == 0:
        try:
            assert (lease.state, lease.lost_reason) == ("LOST", "forked"), lease
            assert not lease.release()
            try:
                lease.renew()
                sys.exit("renewed")
            except leasehold.LeaseLost:
                pass
            assert not client._desk.dog._running and not client._desk.book.held and not told
            assert client.inspect() == []
            with client.lock("b") as mine:          # the client itself can be used again
                assert mine.token > lease.token and mine.holder.endswith(str(os.getpid()))
            try:
                lock.__exit__(None, None, None)     # leaving the parent's with
                sys.exit("left silently")
            except leasehold.LeaseLost as lost:
                assert lost.reason == "forked"
        except BaseException as error:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lease.check()
    assert [h.name for h in client.inspect()] == ["a"]
assert lease.state == "RELEASED"
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_holds_renews_and_releases_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, threading, time, leasehold
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, and so inherited, where tests run in the background
holder, client = leasehold.Client("memory://x"), leasehold.Client("memory://x")
held = holder.lock("a").acquire()
def interrupt():
    while not client._desk.book.waiting:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    client.lock("a").acquire()
    raise SystemExit("acquired")
except KeyboardInterrupt:
    pass
assert [h.state for h in holder.inspect()] == ["held"], holder.inspect()
assert not client._desk.book.waiting and not client._desk.book.owed
held.release(); client.close(); holder.close()
"""


def test_ctrl_c_inside_acquire_leaves_the_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


STOPPED = """
import sys, leasehold
client = leasehold.Client("memory://")
lease = client.lock("a", ttl=0.5).acquire()
print("holding", flush=True)
sys.stdin.readline()
try:
    lease.check()
    print("WROTE", flush=True)
except leasehold.LeaseLost as lost:
    print(lost.reason, flush=True)
sys.exit(0)
"""


def test_a_process_stopped_past_its_ttl_raises_before_any_write() -> None:
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "holding\n"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # it stands still now
    child.stdin.write("go on\n")  # the write is what it will do first when it runs again
    child.stdin.flush()
    threading.Event().wait(0.8)  # the pause itself
    child.send_signal(signal.SIGCONT)
    assert child.stdout.readline() == "stalled\n"
    assert child.wait(20) == 0
    child.stdin.close()
    child.stdout.close()


def test_nothing_is_released_at_exit_and_no_thread_hinders_it() -> None:
    program = "import leasehold; c = leasehold.Client('memory://'); l = c.lock('a').acquire(); print(l.state)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELD\n", "")


def test_desks_are_forgotten_when_collected() -> None:
    client = Client("memory://")
    key = id(client._desk)
    assert recipe._DESKS[key]() is client._desk
    del client
    gc.collect()
    assert key not in recipe._DESKS or recipe._DESKS[key]() is None
