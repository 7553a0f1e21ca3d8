"""Passwords, permissions and TLS of Redlock nodes. Credentials are never shown."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator

import pytest

from harness.rigs.redlock import RedlockRig
from harness.servers.redlock import RedlockNodes
from leasehold import AsyncClient, Client, ConfigError, LeaseholdError, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe
from tests.support.paths import ROOT

PASSWORD = "pa:ss/w@rd,?%"
MEMORY = 32 * 1024 * 1024  # bytes that a server can make a client keep


QUOTED = "pa%3Ass%2Fw%40rd%2C%3F%25"


# The permissions that docs/guarantees/redlock.md documents.
RIGHTS = (
    "resetkeys ~lh1:* resetchannels &lh1:* -@all "
    "+evalsha +eval +time +get +set +del +exists +pexpireat +zadd +zrange +zrem +zcount "
    "+hget +hset +hdel +hgetall +publish +pubsub|numsub +subscribe +ping +scan +select +info +config|get"
)


def test_password_is_required_and_never_shown(start_nodes, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    nodes = start_nodes(password=PASSWORD)
    hosts = nodes.url.partition("://")[2]
    with Client(f"redlock://:{QUOTED}@{hosts}") as client, client.lock("job") as lease:
        assert lease.held
        assert PASSWORD not in repr(client) + repr(probe.engine_state(client))
    for wrong in ("", ":wrongword@", "nobody:wrongword@"):
        with Client(f"redlock://{wrong}{hosts}", call_timeout=1) as client:
            with pytest.raises(ConfigError, match="denied access") as error:
                client.lock("job").acquire()
            assert "wrongword" not in str(error.value)
            assert not probe.pending_releases(client), "no node was asked, so close() has nothing to wait for"
    assert PASSWORD not in caplog.text
    assert "wrongword" not in caplog.text


def test_user_with_documented_permissions_can_use_every_call(start_nodes, wait_until) -> None:
    with open(ROOT / "docs" / "guarantees" / "redlock.md") as page:
        text = " ".join(page.read().split())
        assert RIGHTS.partition("-@all")[0].strip() in text
        assert RIGHTS.partition("-@all ")[2] in text
    nodes = start_nodes()
    for node in nodes.all:
        node.ask("ACL", "SETUSER", "locks", "on", ">secret", *RIGHTS.split())
        node.ask("ACL", "SETUSER", "default", "off")
    url = nodes.url.replace("://", "://locks:secret@")
    with Client(url) as client, Client(url) as other:
        first = client.lock("job", ttl=60).acquire()
        waiting = other.lock("job", wait=0.2)
        with pytest.raises(LeaseholdError):
            waiting.acquire()
        first.renew()
        # The waiter that gave up may stay for a moment: its attempt can arrive after its release (E6).
        wait_until(lambda: [holding.state for holding in client.inspect()] == ["held"])
        assert client.break_lock("job", token=first.token)
        with client.lock("job", min_hold=0.05, wait=20):
            pass
        client.ping()


def test_revoked_permissions_raise_unavailable_then_config_error(start_nodes) -> None:
    nodes = start_nodes()
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
        with pytest.raises(ConfigError, match="denied access"):
            client.lock("new").acquire(wait=0)
        for node in nodes.all:
            node.ask("ACL", "SETUSER", "locks", "+evalsha", "+eval")
        lease.renew()
        assert lease.release()


def test_tls_works_with_ca_certificate_and_fails_without(tmp_path) -> None:
    rig_or_skip(RedlockRig)
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    certificate, key = tmp_path / "s.crt", tmp_path / "s.key"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    from harness.servers.process import free_ports

    tls_ports = free_ports(3)
    nodes = RedlockNodes(count=3)
    try:
        for node, port in zip(nodes.all, tls_ports, strict=True):
            for name, value in (("cert-file", certificate), ("key-file", key), ("ca-cert-file", certificate)):
                node.ask("CONFIG", "SET", f"tls-{name}", str(value))
            node.ask("CONFIG", "SET", "tls-auth-clients", "no")
            node.ask("CONFIG", "SET", "tls-port", port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in tls_ports)
        url = f"redlock://{hosts}?tls=yes&ssl_ca_certs={certificate}"
        with Client(url) as client:
            for _ in range(3):
                with client.lock("job") as lease:
                    lease.renew()
            leases = [client.lock(f"name-{number}", ttl=60).acquire() for number in range(150)]
            assert len(client.inspect()) == 150, "a reply of many TLS records"
            for lease in leases:
                lease.release()

        async def main() -> None:
            async with AsyncClient(url) as client, client.lock("job") as lease:
                assert lease.held

        asyncio.run(main())
        with Client(f"redlock://{hosts}?tls=yes", call_timeout=1) as client, pytest.raises(Unavailable):
            client.lock("job").acquire()
    finally:
        nodes.close()


def test_long_replies_to_missed_releases_end_the_connection(proxied_node, wait_until) -> None:
    """One hostile node could fill the client's memory: 1.7 GB within seconds."""
    url, proxy = proxied_node

    def answer(data: bytes) -> Iterator[bytes]:
        if b"\r\nINFO\r\n" in data:
            yield b"$25\r\nredis_version:7\r\nrun_id:x\r\n*2\r\n$11\r\nappendfsync\r\n$6\r\nalways\r\n"
        yield from [b"$1000000\r\n" + b"x" * 1_000_000 + b"\r\n"] * data.count(b"\r\nEVALSHA\r\n")

    with Client(url, call_timeout=20) as client:
        client.lock("job").acquire().release()
        wait_until(lambda: proxy.subscribed)
        proxy.answer = lambda _: iter(())
        for _ in range(200):
            client.lock("job").acquire().release()
        proxy.answer = answer
        proxy.hang_up()  # the client subscribes again
        wait_until(lambda: proxy.refused or proxy.sent > MEMORY)
    assert proxy.sent < MEMORY
