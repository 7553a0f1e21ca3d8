"""Secrets that must appear nowhere: credentials of a URL, and the ids of claims.

Each test makes failures with a marked secret and searches all that a user, a log or `ps` could show.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import harness.rigs  # noqa: F401  # registers the rigs
from leasehold import Client, ConfigError, LeaseholdError, LeaseLost, NotAcquired, Unavailable
from leasehold.engines import BUILT_IN
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe

SECRET = "s3cr3tMARK"

HOSTS = {"redlock": "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "redis+sentinel": "127.0.0.1:1/service"}
WITH_CREDENTIALS = sorted(set(BUILT_IN) - {"memory", "sqlite"})
# What a password may contain that was not percent-encoded. The parts on both sides of it are secret.
UNESCAPED = {
    "question mark": f"12{SECRET}?{SECRET}=1",
    "question mark, no value": f"{SECRET}?{SECRET}",
    "question mark, digits": f"12?{SECRET}=1&{SECRET}",
    "at sign": f"{SECRET}@{SECRET}",
    "slash": f"{SECRET}/{SECRET}",
    "slash, digits": f"12/{SECRET}",
    "hash": f"{SECRET}#{SECRET}",
    "hash, digits": f"12#{SECRET}",
    "bracket": f"{SECRET}[{SECRET}",
    "percent": f"{SECRET}%zz{SECRET}",
    "colon": f"{SECRET}:{SECRET}",
    "space": f"{SECRET} {SECRET}",
    "newline": f"{SECRET}\n{SECRET}",
    "full-width": f"{SECRET}\uff03{SECRET}",  # becomes # when normalised
    "surrogate": f"{SECRET}\udcff{SECRET}",
}


def shown(error: BaseException) -> str:
    """All that is shown of an error, with everything it was raised from."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


def local_variables(error: BaseException | None) -> Iterator[str]:
    """Of all functions that the error passed, as the error pages of frameworks show them."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename != __file__:
                yield from map(repr, frame.f_locals.copy().values())
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redlock", "etcd", "etcds", "zookeeper"])
def test_error_page_shows_no_password_if_no_server_answers(scheme) -> None:
    with (
        pytest.raises(Unavailable) as failure,
        Client(f"{scheme}://user:{SECRET}@{HOSTS.get(scheme, '127.0.0.1:1')}", call_timeout=3) as client,
    ):
        client.lock("a", wait=0).acquire()
    variables = list(local_variables(failure.value))
    assert any("127.0.0.1" in each for each in variables)  # they were found
    assert SECRET not in str(variables)


@pytest.mark.parametrize("scheme", WITH_CREDENTIALS)
def test_password_that_is_not_escaped_is_not_shown(scheme) -> None:
    for kind, password in UNESCAPED.items():
        url = f"{scheme}://user:{password}@{HOSTS.get(scheme, '127.0.0.1:1')}"
        with pytest.raises(LeaseholdError) as failure, Client(url, call_timeout=0.3) as client:
            assert SECRET not in repr(client), kind
            client.ping()
        assert SECRET not in shown(failure.value), kind


@pytest.mark.parametrize("scheme", WITH_CREDENTIALS)
def test_url_with_a_space_in_its_password_is_refused(scheme) -> None:
    """Text with a space has no end that a message could cut it at, so no such URL is in use."""
    with pytest.raises(ConfigError, match="a space as %20"):
        Client(f"{scheme}://user:12 {SECRET}@{HOSTS.get(scheme, '127.0.0.1:1')}")


def raise_secret() -> str:
    raise RuntimeError(SECRET)


PASSWORDS: dict[str, Callable[[], str]] = {
    "raises": raise_secret,
    "surrogate": lambda: f"{SECRET}\udcff{SECRET}",
    "NUL": lambda: f"{SECRET}\0",
    "line": lambda: f"{SECRET}\r\nX: {SECRET}",
    "long": lambda: SECRET * 7000,
    "controls": lambda: f"{SECRET}\x1b[1m\u202e{SECRET}",
}


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """Of a server that refuses whatever is sent to it."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                with suppress(ConnectionError, TimeoutError), listener.accept()[0] as connection:
                    connection.settimeout(0.2)
                    connection.recv(65_536)
                    connection.sendall(b"-ERR no\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)  # ends the thread, which closing does not
        thread.join()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redlock", "etcd", "postgresql", "mysql", "http"])
def test_password_of_a_function_is_not_shown(scheme, refusing_port) -> None:
    """A driver that could not encode it showed it in its error."""
    host = ",".join(f"127.0.0.{number}:{refusing_port}" for number in range(1, 4 if scheme == "redlock" else 2))
    url = f"{scheme}://{'' if scheme == 'http' else 'user@'}{host}"
    for kind, password in PASSWORDS.items():
        with pytest.raises(LeaseholdError) as failure, Client(url, password=password, call_timeout=0.3) as client:
            assert SECRET not in repr(client), kind
            client.ping()
        assert SECRET not in shown(failure.value), kind
        assert str(failure.value).isprintable(), kind


QUERIES = [
    f"{SECRET}=1",
    f"{SECRET}",
    f"x=1&{SECRET}",
    f"x={SECRET}&x={SECRET}",
    f"x={SECRET};{SECRET}",
    *(
        f"{name}={SECRET}"
        for name in (
            *("durable", "min_replicas", "api_key_file", "tls", "ssl_cert_reqs"),
            *("ca", "cert", "session", "acl", "create"),
        )
    ),
    f"ssl_ca_certs={SECRET}",
    f"tls=yes&ssl_ca_certs={SECRET}",
    f"remap={SECRET}",
    f"schema={SECRET}%00",
    f"listen_url={SECRET}",
    f"unix_socket=/{SECRET}",
    f"db={SECRET}",
]


@pytest.mark.parametrize("scheme", sorted(BUILT_IN))
def test_option_of_a_url_is_not_shown(scheme, tmp_path) -> None:
    target = f"{tmp_path}/x.db" if scheme == "sqlite" else HOSTS.get(scheme, "127.0.0.1:1")
    for query in QUERIES:
        url = f"{scheme}://{target}?{query}"
        with pytest.raises(LeaseholdError) as failure, Client(url, call_timeout=0.3) as client:
            client.ping()
        assert SECRET not in shown(failure.value), query


# ------------------------------------------------- failures of real engines


@pytest.fixture(
    params=["memory", "sqlite", "redis", "redlock", "etcd", "zookeeper", "postgresql", "mysql", "http-redis-pair"]
)
def rig(request) -> Iterator[Rig]:
    rig = rig_or_skip(rig_type(request.param))
    yield rig
    rig.close()


def test_claim_id_is_not_in_errors_logs_events_or_reprs(rig, drawn_secrets, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []

    def look(*things: object) -> None:
        for thing in things:
            seen.extend((str(thing), repr(thing), repr(getattr(thing, "__dict__", ""))))
            if isinstance(thing, BaseException):
                seen.append(shown(thing))

    first = rig.client(namespace="ns", ttl=30, call_timeout=2, on_event=look)
    second = rig.client(namespace="ns", ttl=30, call_timeout=1, on_event=look)
    lock = first.lock("job")
    lease = lock.acquire()
    look(first, lock, lease, probe.claim(lease), *second.inspect())
    with pytest.raises(NotAcquired) as busy:
        second.lock("job", wait=0.3).acquire()
    with pytest.raises(LeaseholdError) as other_kind:
        second.semaphore("job", 3).try_acquire()
        raise NotAcquired("job")
    assert second.break_lock("job", token=lease.token)
    with pytest.raises(LeaseLost) as lost:
        lease.renew()
    look(busy.value, other_kind.value, lost.value, lease)
    if rig.can_cut:
        rig.cut(second)
        with pytest.raises(Unavailable) as unavailable:
            second.lock("other").acquire()
        look(unavailable.value)
        rig.restore(second)
    for client in (first, second):
        with suppress(LeaseholdError):
            client.close()
    everything = "\n".join([*seen, caplog.text])
    assert len(drawn_secrets) >= 3
    for secret in drawn_secrets:
        assert secret not in everything


def test_wrong_credentials_are_not_shown(rig, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    url = rig.client_path().url
    if url.startswith(("memory:", "sqlite:")):
        pytest.skip("this engine has no credentials")
    url = re.sub("://(.*@)?", f"://{SECRET}user:{SECRET}@", url, count=1)
    events: list[str] = []
    namespace = uuid.uuid4().hex
    # ZooKeeper takes any credentials, and the first client of a server owns its root: not this one.
    with rig.client(namespace=namespace) as ordinary, ordinary.lock("other"):
        try:
            with Client(
                url, namespace=namespace, call_timeout=2, on_event=lambda event: events.append(repr(event))
            ) as client:
                client.lock("job").acquire().release()
                texts = [repr(client)]
        except LeaseholdError as error:
            texts = [shown(error)]
    assert f"{SECRET}" not in re.sub(rf"{SECRET}user", "", "\n".join([*texts, *events, caplog.text]))
