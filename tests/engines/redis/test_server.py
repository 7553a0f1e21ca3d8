"""Connecting to a Redis server: URLs, and the settings that the engine requires."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from harness.rigs.redis import RedisRig, server_with_aof
from leasehold import Client, ConfigError, Unavailable, Unsupported
from leasehold.config import EngineConfig
from leasehold.engines import redis as package
from leasehold.engines.redis import scripts
from leasehold.engines.redis import server as server_module
from leasehold.engines.redis.scripts import PubSubCommands
from leasehold.engines.redis.server_settings import ServerSettings
from leasehold.engines.redis.topology import parse_single_server
from leasehold.testing.conformance.suite import rig_or_skip

# ------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    ("url", "expected_address"),
    [
        ("redis://", "localhost:6379"),
        ("redis://example.org", "example.org:6379"),
        ("redis://example.org:7000/3", "example.org:7000"),
        ("redis://user:secret@[::1]:7000/", "[::1]:7000"),
        ("rediss://example.org", "example.org:6379"),
        ("redis+unix:///run/redis.sock", "/run/redis.sock"),
        ("redis+unix:///run/a%20b.sock?db=2", "/run/a b.sock"),
    ],
)
def test_url_gives_the_server_address(url, expected_address) -> None:
    server, _ = parse_single_server(EngineConfig.parse(url, 5.0))
    assert str(server.address) == expected_address
    assert "secret" not in str(server)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://h/zero", "database number"),
        ("redis://h/0/1", "database number"),
        ("redis://h:port", "port"),
        ("redis://h..example", "not a valid host name"),
        ("rediss://h" + "o" * 63, "not a valid host name"),
        ("redis://h?min_replicas=-1", "whole number"),
        ("redis://h?min_replicas=many", "whole number"),
        ("redis://h?allow_eviction=perhaps", "yes or no"),
        ("redis://h?socket_timeout=1", "known options: allow_eviction, min_replicas, password_file"),
        ("redis://h?ssl_ca_certs=x", "known options"),
        ("rediss://h?ssl_ca_certs=/does/not/exist", "TLS options"),
        ("rediss://h?ssl_cert_reqs=maybe", "'required' or 'none'"),
        ("rediss://h?ssl_check_hostname=maybe", "TLS options"),
        ("redis+unix://host/path", "path of a socket"),
        ("redis+unix://", "path of a socket"),
    ],
)
def test_bad_urls_are_refused_when_the_client_is_made(url, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Client(url.replace("://", "://user:verysecret@", 1) if "://h" in url else url)


def test_missing_driver_error_names_the_extra() -> None:
    code = "import sys; sys.modules['hiredis'] = None; import leasehold; leasehold.Client('redis://h')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 'pip install "leasehold[redis]"' in done.stderr


def test_package_contains_the_lua_scripts() -> None:
    folder = os.path.dirname(package.__file__)
    for name in ("attempt", "renew", "release", "break", "inspect"):
        assert os.path.exists(os.path.join(folder, f"{name}.lua"))
        text = scripts.source(name, PubSubCommands())
        assert text.startswith("#!lua")
        assert "--@" not in text


# ------------------------------------------------------------------ connecting


def test_unknown_database_number_raises_config_error(start_redis) -> None:
    server = start_redis()
    with Client(f"redis://127.0.0.1:{server.port}/99") as client, pytest.raises(ConfigError, match="DB index"):
        client.lock("job").acquire()


def test_server_at_max_clients_raises_unavailable(start_redis) -> None:
    server = start_redis("--maxclients", "2")
    one, two = (Client(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    with one, two, one.lock("job"), pytest.raises(Unavailable):
        two.lock("other").acquire()


def test_refused_connection_names_the_settings_that_refuse_it() -> None:
    """Above `maxclients` Redis sends an error that nobody asked for, and hangs up."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"-ERR max number of clients reached\r\n" * 3)  # more than the client asks for
            connection.recv(1000)
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, call_timeout=30) as client, pytest.raises(Unavailable, match="check its maxclients"):
            client.ping()
        server.join(30)


def test_unix_socket_url_connects_and_missing_socket_is_unavailable(start_redis, tmp_path) -> None:
    path = tmp_path / "redis.sock"
    start_redis("--unixsocket", str(path))
    with Client(f"redis+unix://{path}?db=1") as client, client.lock("job") as lease:
        assert lease.held
    with Client(f"redis+unix://{tmp_path}/absent.sock") as client, pytest.raises(Unavailable, match=r"absent\.sock"):
        client.lock("job").acquire()


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_server_with_eviction_policy_is_refused(start_redis, policy) -> None:
    server = start_redis("--maxmemory-policy", policy)
    with Client(f"redis://127.0.0.1:{server.port}") as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match="allow_eviction"):
                client.lock("job").acquire()
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        with client.lock("job"):
            pass
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    with Client(f"redis://127.0.0.1:{server.port}?allow_eviction=yes") as client, client.lock("job"):
        pass


def test_missing_aof_is_logged_once_at_info(start_redis, caplog) -> None:
    """As a warning it came from every worker and with every command, though most locks need no AOF."""
    caplog.set_level(logging.INFO, "leasehold.redis")
    server = start_redis()
    for _ in range(2):
        with Client(f"redis://127.0.0.1:{server.port}") as client, client.lock("job", min_hold=0.1):
            assert client.traits.survives == "nothing"
    assert [record.levelname for record in caplog.records if "no AOF" in record.getMessage()] == ["INFO"]


def test_min_hold_without_aof_is_warned_of_once(start_redis, caplog) -> None:
    server = start_redis()
    for name in ("job", "other"):
        with Client(f"redis://127.0.0.1:{server.port}") as client, client.lock(name, min_hold=60):
            pass
    warnings = [record.getMessage() for record in caplog.records if "no AOF" in record.getMessage()]
    assert len(warnings) == 1
    assert "min_hold" in warnings[0]


def test_required_trait_is_checked_when_built_once_connected(start_redis) -> None:
    server = start_redis()
    with Client(f"redis://127.0.0.1:{server.port}") as client:
        client.lock("job", require={"survives-restart"})  # allowed: the settings are not known yet
        client.connect()
        with pytest.raises(Unsupported, match="survives-restart"):
            client.lock("job", require={"survives-restart"})


@pytest.mark.parametrize("where", ["redis+sentinel://127.0.0.1:1/locks", "redis+cluster://127.0.0.1:1"])
def test_required_trait_that_the_url_rules_out_is_refused_when_built(where) -> None:
    with Client(where) as client, pytest.raises(Unsupported, match="survives-restart"):
        client.lock("job", require={"survives-restart"})


def test_required_trait_the_server_lacks_is_refused_before_any_grant(start_redis) -> None:
    server = start_redis()
    with Client(f"redis://127.0.0.1:{server.port}") as client:
        lock = client.lock("job", require={"survives-restart"})  # allowed: the settings are not known yet
        with pytest.raises(Unsupported):
            lock.acquire()
        assert not client.inspect()


def test_server_with_appendfsync_always_survives_restart(caplog) -> None:
    rig_or_skip(RedisRig)
    (server,) = server_with_aof()
    client = Client(f"redis://127.0.0.1:{server.port}", namespace="survives")
    with client, client.lock("job", require={"survives-restart"}):
        assert client.traits.survives == "restart"
    assert "no AOF" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (ServerSettings("6.2.14", "master", "noeviction", True, "always"), ConfigError, "Redis 7"),
        (ServerSettings("7.2.4", "slave", "noeviction", True, "always"), Unavailable, "replica"),
        (ServerSettings("255.255.255", "master", "allkeys-lfu", True, "always"), ConfigError, "allkeys-lfu"),
    ],
)
def test_unsafe_server_settings_are_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        settings.check("the server", allow_eviction=False)


def test_unreadable_settings_replies_give_default_settings() -> None:
    unknown = server_module.parse_settings(b"# Server\r\nnonsense", [])
    assert unknown == ServerSettings()
    unknown.check("the server", allow_eviction=False)
