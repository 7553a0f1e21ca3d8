"""The lives of a client: made, pickled, closed, collected."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import weakref

import pytest

from leasehold import Client, ConfigError, Unavailable
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
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == engines.GROUP else [])
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


def test_close_waits_for_a_release_that_another_thread_has_sent(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    sent, answered = threading.Event(), threading.Event()
    call = bench.link.call

    def slow(verb: str, args: tuple[object, ...], deadline: float) -> object:
        if verb == "release":
            sent.set()
            assert answered.wait(10)
        return call(verb, args, deadline)

    bench.link.call = slow
    releasing, closing = threading.Thread(target=lease.release), threading.Thread(target=client.close)
    releasing.start()
    assert sent.wait(10)
    closing.start()
    wait_until(lambda: client._desk.closed)
    closing.join(0.2)
    early = not closing.is_alive()
    answered.set()
    closing.join(10)
    releasing.join(10)
    assert not early, "it was still held"
    assert not bench.store.lines


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


def test_desks_are_forgotten_when_collected() -> None:
    client = Client("memory://")
    key = id(client._desk)
    assert recipe._DESKS[key]() is client._desk
    del client
    gc.collect()
    assert key not in recipe._DESKS or recipe._DESKS[key]() is None
