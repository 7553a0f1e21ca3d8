"""Connecting to Redlock nodes: URLs, and the settings that the engine requires."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time

import pytest

from harness.rigs.redlock import RedlockAofRig
from leasehold import AsyncClient, Client, ConfigError, LeaseholdError, Unavailable, Unsupported
from leasehold.config import EngineConfig
from leasehold.engines.redis.scripts import PubSubCommands, source
from leasehold.engines.redlock import url as address_module
from leasehold.engines.redlock.url import parse_nodes as parse
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.foreign_clients import serve_fixed_reply
from tests.support.program import run_program
from tests.support.timing import check_elapsed

# ------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    ("url", "expected_addresses"),
    [
        ("redlock://a,b,c", ["a:6379", "b:6379", "c:6379"]),
        ("redlock://user:secret@a:1,b:2,[::1]:3/4", ["a:1", "b:2", "[::1]:3"]),
        ("redlock://:secret@a,a:1,b,c,d?tls=yes&allow_eviction=yes", ["a:6379", "a:1", "b:6379", "c:6379", "d:6379"]),
    ],
)
def test_url_gives_the_node_addresses(url, expected_addresses) -> None:
    parsed_nodes = parse(EngineConfig.parse(url, 5.0))
    assert [str(node.address) for node in parsed_nodes] == expected_addresses
    assert "secret" not in "".join(map(str, parsed_nodes)) + "".join(map(repr, parsed_nodes))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redlock://", "must be HOST:PORT"),
        ("redlock://h1,h2", "at least three"),
        ("redlock://h1,h2,", "must be HOST:PORT"),
        ("redlock://h1,h2,h1", "twice: it would vote twice"),
        ("redlock://h1,h2,h1:6379", "twice: it would vote twice"),
        ("redlock://h1,h2,h3:port", "port"),
        ("redlock://h1,h2,h3/zero", "database number"),
        ("redlock://h1,h2,h3?min_replicas=1", "known options: allow_eviction, password_file, ssl_"),
        ("redlock://h1,h2,h3?ssl_ca_certs=x", "add tls=yes"),
        ("redlock://h1,h2,h3?tls=yes&ssl_ca_certs=/does/not/exist", "TLS options"),
        ("redlock://h1,h2,h3?allow_eviction=perhaps", "yes or no"),
    ],
)
def test_bad_urls_are_refused_when_the_client_is_made(url, text) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        Client(url.replace("://h", "://user:verysecret@h", 1))
    assert "verysecret" not in str(error.value)


def test_package_contains_the_lua_scripts() -> None:
    from pathlib import Path

    folder = Path(address_module.__file__).parent
    for name in ("attempt", "confirm", "renew", "rejoin", "release", "break"):
        text = source(name, PubSubCommands(), folder)
        assert text.startswith("#!lua")
        assert "--@" not in text


def test_one_server_under_two_addresses_is_refused(start_nodes) -> None:
    nodes = start_nodes()
    first, second, _ = (node.port for node in nodes.all)
    url = f"redlock://127.0.0.1:{first},localhost:{first},127.0.0.1:{second}"
    with Client(url, call_timeout=1) as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"localhost:{first}.*same Redis server|same Redis server.*"):
                client.lock("job").acquire()

    async def main() -> None:
        async with AsyncClient(url, call_timeout=1) as client:
            with pytest.raises(ConfigError, match="same Redis server"):
                await client.lock("job").acquire()

    asyncio.run(main())


# -------------------------------------------------------------------- settings


def test_node_with_eviction_policy_is_refused(start_nodes) -> None:
    nodes = start_nodes()
    nodes.all[1].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with Client(nodes.url) as client, pytest.raises(ConfigError, match=r"allkeys-lru.*allow_eviction=yes"):
        client.lock("job").acquire()
    assert nodes.remaining_keys() == []
    with Client(f"{nodes.url}?allow_eviction=yes") as client, client.lock("job") as lease:
        assert lease.held


def test_node_set_to_evict_later_is_left_out(start_nodes) -> None:
    nodes = start_nodes(count=5)
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


def test_missing_aof_is_logged_once_per_node_at_info(start_nodes, caplog) -> None:
    """As warnings they came with every command, and from `leasehold run --skip-ok` as a mail of cron."""
    caplog.set_level(logging.INFO, "leasehold.redlock")
    nodes = start_nodes()
    for _ in range(2):
        with Client(nodes.url) as client, client.lock("job", min_hold=0.1):
            client.ping()
    lines = [record for record in caplog.records if "no AOF" in record.getMessage()]
    assert [record.levelname for record in lines] == ["INFO"] * 3, "once for each node"
    assert "second holder" in lines[0].getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_skipped_run_without_aof_prints_nothing(start_nodes, tmp_path) -> None:
    nodes = start_nodes(count=5)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD")}
    with Client(nodes.url) as client, client.lock("job"):
        command = ("-u", nodes.url, "run", "--skip-ok", "-n", "job", "--", "true")
        done = run_program(command, tmp_path, environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_min_hold_without_aof_is_warned_of_once(start_nodes, caplog) -> None:
    nodes = start_nodes()
    for name in ("job", "other"):
        with Client(nodes.url) as client, client.lock(name, min_hold=60):
            pass
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert "min_hold" in warning
    assert all(str(node.port) in warning for node in nodes.all)


def test_required_trait_the_nodes_lack_is_refused_before_any_grant() -> None:
    durable_rig = rig_or_skip(RedlockAofRig)
    url = "redlock://" + ",".join(f"127.0.0.1:{node.port}" for node in durable_rig.nodes)
    with Client(url) as client:
        client.lock("job", require={"survives-minority"}).acquire().release()
        assert client.traits.survives == "minority"
        for node in durable_rig.nodes:
            node.ask("CONFIG", "SET", "appendfsync", "everysec")
    try:
        with Client(url) as client:
            with pytest.raises(Unsupported, match="survives-minority"):
                client.lock("job", require={"survives-minority"}).acquire()
            assert client.inspect() == []
    finally:
        for node in durable_rig.nodes:
            node.ask("CONFIG", "SET", "appendfsync", "always")


@pytest.mark.parametrize(
    "text",
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
def test_nodes_that_are_not_redis_are_left_out(start_nodes, text) -> None:
    """Two of the five addresses are not Redis servers: the other three decide."""
    with serve_fixed_reply(text) as first_port, serve_fixed_reply(text) as second_port:
        url = f"{start_nodes().url},127.0.0.1:{first_port},127.0.0.1:{second_port}"
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


def test_client_pickles_as_its_configuration(start_nodes) -> None:
    nodes = start_nodes()
    with Client(nodes.url, namespace="mine") as client:
        copy = pickle.loads(pickle.dumps(client))
        with copy, client.lock("job"):
            assert copy.lock("job").try_acquire() is None


def test_unreachable_nodes_raise_unavailable_at_once() -> None:
    with Client("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3") as client:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"0 of 3 nodes answered, 2 are needed.*127\.0\.0\.1:1.*refused"):
            client.lock("job").acquire()
        check_elapsed(began, 2)
