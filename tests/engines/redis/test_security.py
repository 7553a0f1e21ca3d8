"""Passwords, permissions and TLS of a Redis server. Credentials are never shown."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
import traceback

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from leasehold import AsyncClient, Client, ConfigError, NotAcquired, Unavailable
from leasehold.errors import AccessDenied
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import health, probe, probe_redis
from tests.support.paths import ROOT
from tests.support.redis_servers import TlsServer, remaining_keys, url, wait_until_queued
from tests.support.timing import check_elapsed

PASSWORD = "pa:ss/w@rd?%"


QUOTED = "pa%3Ass%2Fw%40rd%3F%25"


PAGE = ROOT / "docs" / "guarantees" / "redis.md"


# The permissions that the page documents: what follows the password in its ACL command.
RIGHTS = PAGE.read_text().partition("ACL SETUSER locks on >password")[2].partition("```")[0]


# ------------------------------------------------------------------- passwords


def test_password_is_required_and_never_shown(start_redis, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_redis(password=PASSWORD)
    with Client(f"redis://:{QUOTED}@127.0.0.1:{server.port}/2") as client:
        with client.lock("job"):
            assert "verysecret" not in repr(client)
            assert "pa:ss" not in repr(client) + repr(vars(probe.engine(client))) + repr(probe.config(client))
        assert "db2" in server.info("keyspace")
    output = caplog.text
    for user in ("", ":verysecret@"):
        with Client(url(server, user=user)) as client, pytest.raises(ConfigError) as caught:
            client.lock("job").acquire()
        output += "".join(traceback.format_exception(caught.value)) + repr(pickle.loads(pickle.dumps(caught.value)))
    assert "verysecret" not in output
    assert PASSWORD not in output


def test_password_is_not_shown_when_server_echoes_the_command(start_redis) -> None:
    server = start_redis("--rename-command", "AUTH", "")
    for secret in ("verysecret", "verysecret" * 30):
        with Client(url(server, user=f"locks:{secret}@")) as client, pytest.raises(ConfigError) as caught:
            client.lock("job").acquire()
        assert "AUTH" in str(caught.value)
        assert "verysecret" not in str(caught.value)


# ----------------------------------------------------------------- permissions


def test_user_with_documented_permissions_can_use_every_call(start_redis) -> None:
    server = start_redis()
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", *RIGHTS.split())
    url = f"redis://locks:pw@127.0.0.1:{server.port}"
    with Client(url) as one, Client(url) as other:
        lease = one.lock("job", ttl=60, delay=0.1).acquire()
        assert other.lock("job").try_acquire() is None
        end_lease = (lease.release, lambda: one.break_lock("job", token=lease.token))
        for end in end_lease:
            waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
            waiter.start()
            while not any(holding.state == "waiting" for holding in one.inspect()):
                continue
            lease.renew()
            server.ask("SCRIPT", "FLUSH")
            assert end()
            waiter.join(60)
            lease = one.lock("job", ttl=60, delay=0.1).acquire(wait=20)
        lease.release()
        assert health.probe(url).up
        with one.semaphore("pool", 2), other.semaphore("pool", 2):
            pass
        with one.rwlock("page").read(), other.rwlock("page").read():
            pass
        assert one.once("k", lambda: 1) == other.once("k", lambda: 2) == 1
        assert one.traits.survives == "nothing"
        assert probe_redis.only_server(one).settings.appendfsync == "everysec"


def test_documented_permissions_suffice_with_min_replicas(start_redis) -> None:
    server = start_redis()
    start_redis(primary=server)
    poll(lambda: "state=online" in server.info("replication").get("slave0", ""), 30, lambda: "the replica is in sync")
    url = f"redis://locks:pw@127.0.0.1:{server.port}?min_replicas=1"
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", *RIGHTS.split())
    with Client(url, call_timeout=2) as client:
        with client.lock("job") as lease:
            lease.renew()
        server.ask("ACL", "SETUSER", "locks", "-wait")
        with pytest.raises(ConfigError, match="wait"):
            client.lock("job").acquire()
        poll(lambda: not client.inspect(), 60, lambda: "the unconfirmed grant is released")


def test_user_without_info_and_config_can_lock_and_is_warned(start_redis, caplog) -> None:
    server = start_redis()
    rights = RIGHTS.replace("+info", "").replace("+config|get", "")
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", *rights.split())
    with Client(f"redis://locks:pw@127.0.0.1:{server.port}") as client, client.lock("job"):
        assert client.traits.survives == "nothing", "an unknown setting is not promised"
    assert "it may evict held locks" in caplog.text


def test_waiter_without_subscribe_permission_still_acquires(start_redis, caplog) -> None:
    server = start_redis()
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", *RIGHTS.replace("+subscribe", "").split())
    url = f"redis://locks:pw@127.0.0.1:{server.port}"
    with Client(url) as one, Client(url) as other:
        lease = one.lock("job").acquire()
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        while not any(holding.state != "held" for holding in one.inspect()):
            continue
        lease.release()
        waiter.join(60)
        assert not waiter.is_alive()
    assert "falling back to polling" in caplog.text


def test_missing_evalsha_permission_raises_config_error(start_redis) -> None:
    server = start_redis()
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", *RIGHTS.replace("+evalsha", "").split())
    with Client(f"redis://locks:pw@127.0.0.1:{server.port}") as client:
        with pytest.raises(ConfigError, match="evalsha"):
            client.lock("job").acquire()
        assert not probe.pending_releases(client), "nothing was written, so there is nothing to release"


@pytest.mark.parametrize("held", [True, False], ids=["held", "free"])  # when the watchdog ends the waiter's claim
@pytest.mark.parametrize("missing", ["pubsub|numsub", "pexpireat", "publish", "zadd"])
def test_missing_script_permission_leaves_no_claim_behind(server, missing, held) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", f"-{missing}")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        with pytest.raises((ConfigError, NotAcquired)):  # some calls work without this permission
            other.lock("job", wait=0.3).acquire()
        if not held:
            lease.release()
        server.ask("ACL", "SETUSER", "locks", f"+{missing}")  # the watchdog can now confirm the pending release
        poll(lambda: not probe.pending_releases(other), 60, lambda: "the waiter's claim has ended")
        lease.release()
        poll(lambda: not remaining_keys(server), 60, lambda: "no key is left")


def test_record_that_may_not_be_read_is_not_taken_for_a_foreign_one(server) -> None:
    """The error said that another program had written it, and to remove it."""
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all")
    with Client(url(server, user="locks:pw@")) as client:
        assert client.once("k", lambda: 1) == 1
        server.ask("ACL", "SETUSER", "locks", "-get")
        with pytest.raises(AccessDenied, match="check the permissions"):
            client.once("k", lambda: 2)
        server.ask("ACL", "SETUSER", "locks", "+get")
        assert client.once("k", lambda: 3) == 1


def test_waiter_that_loses_its_permission_leaves_the_queue(server) -> None:
    server.ask("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all")
    with Client(url(server)) as one, Client(url(server, user="locks:pw@"), call_timeout=1) as other:
        lease = one.lock("job", ttl=60).acquire()
        errors: list[Exception] = []

        def wait() -> None:
            try:
                other.lock("job", wait=30).acquire()
            except ConfigError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until_queued(one, "job")
        server.ask("ACL", "SETUSER", "locks", "-evalsha")
        for waiter_state in probe.waiters(other):
            waiter_state.woken = True
            waiter_state.signal.set()  # makes the waiter attempt again
        waiter.join(60)
        assert errors
        server.ask("ACL", "SETUSER", "locks", "+evalsha")
        began = time.monotonic()
        wait_until_queued(one, "job", 0)
        check_elapsed(began, 5, "the claim was released, it did not expire")
        assert lease.held


# ------------------------------------------------------------------------- TLS


def test_tls_works_with_client_and_server_certificates(certificate) -> None:
    rig_or_skip(RedisRig)
    key, cert = certificate
    server = TlsServer("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert).start()
    base = f"rediss://127.0.0.1:{server.port}"
    try:
        with Client(f"{base}?ssl_ca_certs={cert}&ssl_certfile={cert}&ssl_keyfile={key}") as client:
            for _ in range(20):
                with client.lock("job") as lease:
                    lease.renew()
            leases = [client.lock(f"name-{number}", purpose="p" * 200).acquire() for number in range(150)]
            assert len(client.inspect("name-")) == 150, "the replies are larger than a TLS record"
            for lease in leases:
                lease.release()
            lease = client.lock("told").acquire()
            assert client.break_lock("told", token=lease.token)
            assert lease.wait_lost(10)

        async def main() -> None:
            async with AsyncClient(f"{base}?ssl_ca_certs={cert}&ssl_certfile={cert}&ssl_keyfile={key}") as client:
                leases = await asyncio.gather(*[client.lock(f"n-{n}").acquire() for n in range(200)])
                assert len(await client.inspect("n-")) == 200
                await asyncio.gather(*[lease.release() for lease in leases])

        asyncio.run(main())
        with Client(base, call_timeout=2) as client, pytest.raises(Unavailable, match="certificate"):
            client.lock("job").acquire()
        plain = f"redis://127.0.0.1:{server.port}"
        with Client(plain, call_timeout=1) as client, pytest.raises(Unavailable):
            client.lock("job").acquire()
    finally:
        server.kill()
