"""The life of a client: built, pickled, closed, garbage-collected."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.config import ClientOptions, EngineConfig
from leasehold.model import Claim, Holder
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_named_memory_engine_is_shared_and_unnamed_is_private() -> None:
    with (
        Client("memory://t1") as first,
        Client("memory://t1") as second,
        Client("memory://") as private,
        first.lock("a"),
    ):
        assert second.lock("a").try_acquire() is None
        with private.lock("a"):
            pass


def test_namespaces_are_isolated(bench) -> None:
    first, second = bench.client(namespace="x"), bench.client(namespace="y")
    with first.lock("a"), second.lock("a"):
        assert [holding.namespace for holding in first.inspect()] == ["x"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redys://h", r"no engine for redys:// \(did you mean redis://\?\); known: .*memory://"),
        ("valky://h", r"no engine for valky:// \(did you mean valkey://\?\); known: "),
        ("nonsense", 'does not begin with "scheme://"'),
        (7, "not an object of type int"),
        ("memory://?durable=yes", "option 1 of this memory:// URL does not exist; known options: none"),
        ("sqlite://?durably=yes", r"option 1 of this sqlite:// URL does not exist \(did you mean durable\?\)"),
        ("p@ss://word", "an engine URL looks like"),
        ("memory://?x=1&x=2", "given twice"),
        ("memory://?;;", "the options of this memory:// URL cannot be parsed"),
        ("redis://[::1", "the host of this redis:// URL cannot be parsed"),
        ("redis://localhost:65536", "is the port a number from 1 to 65535"),
        ("redis://localhost?pasword_file=x", r"did you mean password_file\?\); known options: .*password_file"),
    ],
)
def test_invalid_urls_are_refused_with_a_hint(url, says) -> None:
    with pytest.raises(ConfigError, match=says):
        Client(url)


def test_url_defaults_to_environment_variable(monkeypatch) -> None:
    monkeypatch.setenv("LEASEHOLD_URL", "memory://env")
    with Client() as first, Client("memory://env") as second, first.lock("a"):
        assert second.lock("a").try_acquire() is None


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_empty_url_is_refused_instead_of_using_the_default(make, empty, monkeypatch) -> None:
    """`-u "$LOCKS"` without LOCKS: two machines would both use a local file, and both would run."""
    monkeypatch.setenv("LEASEHOLD_URL", "memory://env")
    with pytest.raises(ConfigError, match="the URL is empty: set it to an engine's URL"):
        make(empty)
    monkeypatch.setenv("LEASEHOLD_URL", empty)
    with pytest.raises(ConfigError, match=r"[$]LEASEHOLD_URL is empty"):
        make()


def test_empty_store_is_refused(bench) -> None:
    with pytest.raises(ConfigError, match="store is empty"):
        bench.client().once("k", lambda: 1, store="")


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"call_timeout": -1}, {"namespace": "a\0"}, {"on_event": 3}, {"holder": 4}]
)
def test_invalid_client_options_are_refused(options) -> None:
    with pytest.raises(ConfigError):
        Client("memory://", **options)


def test_entry_points_add_engines(monkeypatch) -> None:
    from importlib.metadata import EntryPoint

    from leasehold import engines

    point = EntryPoint("mine", "leasehold.engines.memory:open", engines.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [point] if group == engines.ENTRY_POINT_GROUP else []
    )
    with Client("mine://") as client, client.lock("a"):
        pass
    with pytest.raises(ConfigError, match=r"known: .*memory://, mine://"):
        Client("other://")


def test_repr_shows_no_password() -> None:
    config = EngineConfig.parse("redis://user:hunter2@host/0?password=hunter3", 5.0)
    options = ClientOptions("redis://user:hunter2@host")
    assert "hunter" not in repr(config) + repr(options)


def test_options_with_passwords_are_not_written_out_value_by_value() -> None:
    """Tools that report errors write local variables as JSON: tuples by their members, all else by its repr."""
    options = ClientOptions("redis://user:hunter2@host", password="hunter3")
    config = ClientOptions("redis://user:hunter2@host/0?password=hunter3").engine_config()
    text = json.dumps([options, config, options.replace(ttl=5.0), config.replace(scheme="rediss")], default=repr)
    assert "hunter" not in text
    assert text.count("EngineConfig redis") == 2  # they were written


def test_client_and_lock_pickle_as_configuration() -> None:
    with Client("memory://pickled", namespace="ns", ttl=7, holder="me") as client:
        again = pickle.loads(pickle.dumps(client))
        lock = pickle.loads(pickle.dumps(client.lock("a", wait=3)))
        with again, client.lock("a"):
            assert again.lock("a").try_acquire() is None
            assert again.inspect()[0].holder.label == "me"
            assert again.lock("b").options.ttl == 7
            assert (lock.name, lock.options.wait) == ("a", 3)
        probe.client_of(lock).close()


def test_client_with_custom_engine_cannot_be_pickled(bench) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(bench.client())


def test_close_releases_held_leases_and_refuses_further_calls(bench) -> None:
    client = bench.client()
    lease = client.lock("a", reentrant=True).acquire()
    assert client.lock("a", reentrant=True).acquire() is lease
    client.close()
    client.close()
    assert lease.state == "RELEASED"
    assert not bench.server.lock_states
    for use in (client.lock("a").acquire, client.inspect, client.ping, client.connect):
        with pytest.raises(ConfigError, match="this client is closed"):
            use()


@contextmanager
def advancing_clock(bench) -> Iterator[None]:
    """The manual clock moves on until the body has ended: on a clock that stands still, close() waits for ever."""
    ended = threading.Event()

    def advance() -> None:
        while not ended.wait(0.01):
            bench.clock.advance(0.1)

    thread = threading.Thread(target=advance)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_close_waits_for_pending_releases_up_to_call_timeout(bench, caplog) -> None:
    client = bench.client(call_timeout=0.5)
    lease = client.lock("a").acquire()
    bench.transport.silent = True
    with caplog.at_level(logging.WARNING), advancing_clock(bench):
        client.close()
    assert "in time: it may stay held until its ttl is over" in caplog.text
    assert lease.state == "RELEASED"


def test_close_reports_no_release_of_claims_that_are_not_its_own(bench, caplog) -> None:
    """A server that woke thousands of unknown claims made close() write as many warnings."""
    client = bench.client(call_timeout=0.1)
    lease = client.lock("a").acquire()
    bench.transport.silent = True
    for number in range(100):
        id_hash = f"{number:032x}"
        stray = Claim("", "b", "", id_hash, Holder("stray"), 15.0)
        probe.registry(client).on_notification("reserved", id_hash, 0.0, stray)
    with caplog.at_level(logging.WARNING), advancing_clock(bench):
        client.close()
    assert caplog.text.count("did not confirm the release of a") == 1
    assert "the release of b" not in caplog.text
    assert lease.state == "RELEASED"


def test_close_makes_waiters_raise_and_leave_the_queue(bench, wait_until) -> None:
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
    wait_until(lambda: probe.waiters(client))
    client.close()
    waiter.join(60)
    assert out
    assert [holding.state for holding in bench.client().inspect()] == ["held"]
    held.release()


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_close_waits_for_release_in_flight_in_another_thread(bench, wait_until, again) -> None:
    # A second release of the same lease, which has nothing to do, removed the first from the calls in flight.
    client = bench.client()
    lease = client.lock("a").acquire()
    sent, answered = threading.Event(), threading.Event()
    call = bench.transport.call

    def slow(verb: str, args: tuple[object, ...], deadline: float) -> object:
        if verb == "release":
            sent.set()
            assert answered.wait(60)
        return call(verb, args, deadline)

    bench.transport.call = slow
    releasing, closing = threading.Thread(target=lease.release), threading.Thread(target=client.close)
    releasing.start()
    assert sent.wait(60)
    if again:
        assert lease.release() is False
    closing.start()
    wait_until(lambda: probe.is_closed(client))
    closing.join(0.2)
    early = not closing.is_alive()
    answered.set()
    closing.join(60)
    releasing.join(60)
    assert not early, "close() returned before the release was confirmed"
    assert not bench.server.lock_states


def test_grant_received_while_client_closes_is_released(bench) -> None:
    client = bench.client()
    lock = client.lock("a")
    watch = probe.watchdog(client).watch

    def closing(lease, lease_ref) -> None:
        watch(lease, lease_ref)
        probe.core(client).closed = True

    probe.watchdog(client).watch = closing
    with pytest.raises(ConfigError, match="closed"):
        lock.acquire()
    probe.core(client).closed = False
    assert not bench.server.lock_states


def test_collected_client_leaves_no_client_core() -> None:
    client = Client("memory://")
    with client.lock("a"):
        pass
    core_ref = weakref.ref(probe.core(client))
    del client
    end = threading.Event()
    for _ in range(500):
        gc.collect()
        if core_ref() is None:
            break
        end.wait(0.01)
    assert core_ref() is None


def test_lease_is_renewed_after_its_client_is_collected(bench, wait_until) -> None:
    client = bench.client()
    lease = client.lock("a", ttl=30).acquire()
    gone = weakref.ref(client)
    bench.clients.remove(client)
    del client
    gc.collect()
    assert gone() is None
    for now in (1010, 1020, 1030, 1040):
        bench.clock.advance(10)
        wait_until(lambda now=now: probe.renewed_at(lease) == now)
    assert lease.release()


def test_ping_connect_and_traits_of_client(bench) -> None:
    client = bench.client()
    assert client.ping() == 0.0  # the manual clock stands still
    client.connect()
    assert client.traits.fencing
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        client.ping()


def test_collected_client_core_is_removed_from_fork_registry() -> None:
    client = Client("memory://")
    key = id(probe.core(client))
    assert probe.live_core(key) is probe.core(client)
    del client
    gc.collect()
    assert probe.live_core(key) is None


@pytest.mark.parametrize(
    ("alias", "scheme"),
    [
        ("postgres", "postgresql"),
        ("postgresql+psycopg", "postgresql"),
        ("mysql+pymysql", "mysql"),
        ("mariadb+pymysql", "mariadb"),
        ("valkey", "redis"),
        ("valkeys", "rediss"),
        ("REDIS", "redis"),
    ],
)
def test_schemes_of_other_libraries_are_accepted(alias, scheme):
    config = EngineConfig.parse(f"{alias}://user:pw@host:1/2", 5.0)
    assert vars(config) == vars(EngineConfig.parse(f"{scheme}://user:pw@host:1/2", 5.0))
    with Client(f"{alias}://user:pw@host:1/2") as client:  # connects when it is used
        assert probe.config(client).scheme == scheme
