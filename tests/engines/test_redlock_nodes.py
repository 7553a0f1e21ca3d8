"""How the nodes of a redlock are reached, and what is asked of them: URLs, passwords, rights, TLS, settings."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import subprocess
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseholdError, Unavailable, Unsupported
from leasehold.config import EngineConfig
from leasehold.engines.redis import server as server_module
from leasehold.engines.redis.scripts import Publishing, source
from leasehold.engines.redlock import address as address_module
from leasehold.engines.redlock.address import nodes as parse
from leasehold.testing.redlock_rig import RedlockAofRig, RedlockRig
from leasehold.testing.servers.redlock import Nodes
from leasehold.testing.suite import made

PASSWORD = "pa:ss/w@rd,?%"
QUOTED = "pa%3Ass%2Fw%40rd%2C%3F%25"

# As in docs/guarantees/redlock.md: what Leasehold needs, and no more.
RIGHTS = (
    "resetkeys ~lh1:* resetchannels &lh1:* -@all "
    "+evalsha +eval +time +get +set +del +exists +pexpireat +zadd +zrange +zrem +zcount "
    "+hget +hset +hdel +hgetall +publish +pubsub|numsub +subscribe +ping +scan +select +info +config|get"
)


@pytest.fixture
def start():
    made(RedlockRig)  # a skip where there is no Redis
    started = []

    def run(*options: str, **more) -> Nodes:
        started.append(Nodes(*options, **{"count": 3, **more}))
        return started[-1]

    yield run
    for nodes in started:
        nodes.close()


# --------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redlock://a,b,c", ["a:6379", "b:6379", "c:6379"]),
        ("redlock://user:secret@a:1,b:2,[::1]:3/4", ["a:1", "b:2", "::1:3"]),
        ("redlock://:secret@a,a:1,b,c,d?tls=yes&allow_eviction=yes", ["a:6379", "a:1", "b:6379", "c:6379", "d:6379"]),
    ],
)
def test_where_a_url_leads(url, where) -> None:
    found = parse(EngineConfig.parse(url, 5.0))
    assert [str(node.address) for node in found] == where
    assert "secret" not in "".join(map(str, found)) + "".join(map(repr, found))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redlock://", "a host and a port"),
        ("redlock://h1,h2", "at least three"),
        ("redlock://h1,h2,", "a host and a port"),
        ("redlock://h1,h2,h1", "stands twice"),
        ("redlock://h1,h2,h1:6379", "stands twice"),
        ("redlock://h1,h2,h3:port", "port"),
        ("redlock://h1,h2,h3/zero", "number of a database"),
        ("redlock://h1,h2,h3?min_replicas=1", "known options: allow_eviction, ssl_"),
        ("redlock://h1,h2,h3?ssl_ca_certs=x", "needs tls=yes"),
        ("redlock://h1,h2,h3?tls=yes&ssl_ca_certs=/does/not/exist", "TLS options"),
        ("redlock://h1,h2,h3?allow_eviction=perhaps", "yes or no"),
    ],
)
def test_bad_urls_are_refused_when_the_client_is_made(url, says) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        Client(url.replace("://h", "://user:verysecret@h", 1))
    assert "verysecret" not in str(error.value)


def test_the_scripts_are_in_the_package() -> None:
    from pathlib import Path

    folder = Path(address_module.__file__).parent
    for name in ("attempt", "confirm", "renew", "retake", "release", "break"):
        text = source(name, Publishing(), folder)
        assert text.startswith("#!lua")
        assert "--@" not in text


def test_one_server_under_two_addresses_is_refused(start) -> None:
    nodes = start()
    first, second, _ = (node.port for node in nodes.all)
    url = f"redlock://127.0.0.1:{first},localhost:{first},127.0.0.1:{second}"
    with Client(url, call_timeout=1) as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"localhost:{first}.*one Redis server|one Redis server.*"):
                client.lock("job").acquire()

    async def main() -> None:
        async with AsyncClient(url, call_timeout=1) as client:
            with pytest.raises(ConfigError, match="one Redis server"):
                await client.lock("job").acquire()

    asyncio.run(main())


# --------------------------------------------------------------- who may ask


def test_a_password_is_needed_and_never_shown(start, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    nodes = start(password=PASSWORD)
    hosts = nodes.url.partition("://")[2]
    with Client(f"redlock://:{QUOTED}@{hosts}") as client, client.lock("job") as lease:
        assert lease.held
        assert PASSWORD not in repr(client) + repr(client._desk.book.shelf)
    for wrong in ("", ":wrongword@", "nobody:wrongword@"):
        with Client(f"redlock://{wrong}{hosts}", call_timeout=1) as client:
            with pytest.raises(ConfigError, match="does not permit") as error:
                client.lock("job").acquire()
            assert "wrongword" not in str(error.value)
            assert not client._desk.book.owed, "no node was asked, so close() has nothing to wait for"
    assert PASSWORD not in caplog.text
    assert "wrongword" not in caplog.text


def test_a_user_with_the_documented_rights_can_do_everything(start, until) -> None:
    with open(os.path.join(os.path.dirname(__file__), "../../docs/guarantees/redlock.md")) as page:
        text = " ".join(page.read().split())
        assert RIGHTS.partition("-@all")[0].strip() in text
        assert RIGHTS.partition("-@all ")[2] in text
    nodes = start()
    for node in nodes.all:
        node.ask("ACL", "SETUSER", "locks", "on", ">secret", *RIGHTS.split())
        node.ask("ACL", "SETUSER", "default", "off")
    url = nodes.url.replace("://", "://locks:secret@")
    with Client(url) as client, Client(url) as other:
        first = client.lock("job", ttl=3).acquire()
        waiting = other.lock("job", wait=0.2)
        with pytest.raises(LeaseholdError):
            waiting.acquire()
        first.renew()
        assert [holding.name for holding in client.inspect()] == ["job"]
        assert client.break_lock("job", token=first.token)
        with client.lock("job", min_hold=0.05, wait=5):
            pass
        client.ping()


def test_rights_taken_away_in_the_middle_are_unavailable_then_refused(start) -> None:
    nodes = start()
    for node in nodes.all:
        node.ask("ACL", "SETUSER", "locks", "on", ">secret", *RIGHTS.split())
    with Client(nodes.url.replace("://", "://locks:secret@"), call_timeout=1) as client:
        lease = client.lock("job", ttl=30).acquire()
        nodes.all[0].ask("ACL", "SETUSER", "locks", "-evalsha", "-eval")
        lease.renew()
        for node in nodes.all[1:]:
            node.ask("ACL", "SETUSER", "locks", "-evalsha", "-eval")
        with pytest.raises(Unavailable, match="permissions"):
            lease.renew()
        with pytest.raises(ConfigError, match="does not permit"):
            client.lock("new").acquire(wait=0)
        for node in nodes.all:
            node.ask("ACL", "SETUSER", "locks", "+evalsha", "+eval")
        lease.renew()
        assert lease.release()


# ------------------------------------------------------------------ settings


def test_nodes_that_may_evict_locks_are_refused(start) -> None:
    nodes = start()
    nodes.all[1].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with Client(nodes.url) as client, pytest.raises(ConfigError, match=r"allkeys-lru.*allow_eviction=yes"):
        client.lock("job").acquire()
    assert nodes.left() == []
    with Client(f"{nodes.url}?allow_eviction=yes") as client, client.lock("job") as lease:
        assert lease.held


def test_a_node_that_is_set_to_evict_later_is_left_out(start) -> None:
    nodes = start(count=5)
    with Client(nodes.url, call_timeout=1) as client:
        client.lock("job").acquire().release()
        nodes.all[1].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        nodes.all[1].ask("CLIENT", "KILL", "TYPE", "normal")
        with client.lock("job"):
            assert not nodes.all[1].ask("KEYS", "lh1:*:job")
        for node in nodes.all[2:]:
            node.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            node.ask("CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(LeaseholdError, match="allkeys-lru"):
            client.lock("job").acquire(wait=0)


def test_without_a_log_a_warning_names_the_consequence(start, caplog) -> None:
    server_module._SAID.clear()
    nodes = start()
    with Client(nodes.url) as client:
        client.ping()
        client.ping()
    said = [record.getMessage() for record in caplog.records if "appendonly" in record.getMessage()]
    assert len(said) == 3, "once for each node"
    assert "second holder" in said[0]


def test_what_the_settings_decide_is_refused_before_any_grant() -> None:
    logged = made(RedlockAofRig)
    url = "redlock://" + ",".join(f"127.0.0.1:{node.port}" for node in logged.nodes)
    with Client(url) as client:
        client.lock("job", require={"survives-minority"}).acquire().release()
        assert client.traits.survives == "minority"
        for node in logged.nodes:
            node.ask("CONFIG", "SET", "appendfsync", "everysec")
    try:
        with Client(url) as client:
            with pytest.raises(Unsupported, match="survives-minority"):
                client.lock("job", require={"survives-minority"}).acquire()
            assert client.inspect() == []
    finally:
        for node in logged.nodes:
            node.ask("CONFIG", "SET", "appendfsync", "always")


def test_by_tls(tmp_path) -> None:
    made(RedlockRig)
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    certificate, key = tmp_path / "s.crt", tmp_path / "s.key"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    from leasehold.testing.servers.process import free_ports

    tls = free_ports(3)
    nodes = Nodes(count=3)
    try:
        for node, port in zip(nodes.all, tls, strict=True):
            for name, value in (("cert-file", certificate), ("key-file", key), ("ca-cert-file", certificate)):
                node.ask("CONFIG", "SET", f"tls-{name}", str(value))
            node.ask("CONFIG", "SET", "tls-auth-clients", "no")
            node.ask("CONFIG", "SET", "tls-port", port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in tls)
        url = f"redlock://{hosts}?tls=yes&ssl_ca_certs={certificate}"
        with Client(url) as client:
            for _ in range(3):
                with client.lock("job") as lease:
                    lease.renew()
            large = [client.lock(f"name-{number}", ttl=60).acquire() for number in range(150)]
            assert len(client.inspect()) == 150, "an answer of many records"
            for lease in large:
                lease.release()

        async def main() -> None:
            async with AsyncClient(url) as client, client.lock("job") as lease:
                assert lease.held

        asyncio.run(main())
        with Client(f"redlock://{hosts}?tls=yes", call_timeout=1) as client, pytest.raises(Unavailable):
            client.lock("job").acquire()
    finally:
        nodes.close()


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n",
        b"+OK\r\n" * 99,
        b"*-1\r\n" * 99,
        b":1\r\n" * 99,
        b"",
        b"$-5\r\n",
    ],
)
def test_what_is_not_redis_is_left_out(start, says, beside) -> None:
    """Two of five places are something else altogether: the others decide."""
    stranger = beside("others").stranger
    with stranger(says) as one, stranger(says) as two:
        url = f"{start().url},127.0.0.1:{one},127.0.0.1:{two}"
        with Client(url, call_timeout=2) as client:
            for _ in range(3):
                with client.lock("job"):
                    pass

        async def main() -> None:
            async with AsyncClient(url, call_timeout=2) as client:
                for _ in range(3):
                    async with client.lock("job"):
                        pass

        asyncio.run(main())


def test_a_client_pickles_as_its_configuration(start) -> None:
    nodes = start()
    with Client(nodes.url, namespace="mine") as client:
        copy = pickle.loads(pickle.dumps(client))
        with copy, client.lock("job"):
            assert copy.lock("job").try_acquire() is None


def test_nobody_there_is_unavailable_at_once() -> None:
    with Client("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3") as client:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"0 of 3 nodes answered, 2 are needed.*127\.0\.0\.1:1.*refused"):
            client.lock("job").acquire()
        assert time.monotonic() - began < 2
