"""Access control: the permissions a role needs, expired auth tokens, revoked permissions."""

from __future__ import annotations

import time
from functools import partial

import pytest

from harness.servers.etcd import Etcd
from leasehold import Client, ConfigError
from leasehold.runtime.base import run_sync


@pytest.fixture
def enable_users(etcdctl):
    return partial(make_users, etcdctl)


def make_users(etcdctl, member: Etcd, prefix: str) -> str:
    """Enable users and a role that has only the permissions listed in docs/guarantees/etcd.md."""
    etcdctl(member, "user", "add", "root:top")
    etcdctl(member, "role", "add", "locks")
    etcdctl(member, "role", "grant-permission", "--prefix=true", "locks", "readwrite", f"{prefix}/lh1/")
    etcdctl(member, "user", "add", "app:s3cr:t/?")
    etcdctl(member, "user", "grant-role", "app", "locks")
    etcdctl(member, "user", "grant-role", "root", "root")
    etcdctl(member, "auth", "enable")
    return f"etcd://app:s3cr%3At%2F%3F@127.0.0.1:{member.port}/{prefix}"


def test_role_with_the_documented_permissions_suffices(start_member, enable_users, eventually, start_waiter) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url) as client, Client(url) as other:
        client.ping()
        lease = client.lock("job").acquire()
        waiting = start_waiter(other)
        lease.renew(60)
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 2)
        waiting.wait_granted(20)
        with client.semaphore("s", 2), client.rwlock("r").read(), client.lock("d", delay=1):
            pass
        with client.lock("m", min_hold=2):
            pass
        assert client.once("k", lambda: 1) == other.once("k", lambda: 2) == 1
        run_sync(client._rebase(0))
    with pytest.raises(ConfigError) as denied, Client(url.replace("/app", "/elsewhere")) as client:
        client.lock("job").acquire()
    assert "s3cr" not in str(denied.value)
    for wrong in (f"etcd://app:wrong@127.0.0.1:{member.port}/app", f"etcd://127.0.0.1:{member.port}/app"):
        with pytest.raises(ConfigError), Client(wrong) as client:
            client.lock("job").acquire()


def test_user_without_auth_enabled_is_a_config_error(start_member) -> None:
    with pytest.raises(ConfigError), Client(f"etcd://app:pw@127.0.0.1:{start_member().port}") as client:
        client.ping()


def test_expired_auth_token_is_replaced_silently(start_member, enable_users, start_waiter, etcdctl) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=8) as client, Client(url, call_timeout=8) as other:
        lease = client.lock("job", ttl=30).acquire()
        waiting = start_waiter(other)
        member.restart()  # the member forgets all auth tokens
        lease.verify()
        etcdctl(member, "user", "add", "somebody:x", user="root:top")  # auth tokens now have an old revision
        lease.verify()
        assert lease.release()
        waiting.wait_granted(20)


def test_watch_refused_for_an_expired_login_is_restarted(start_member, enable_users, eventually) -> None:
    """etcd refuses the watch on a stream that stays open, so nothing else would renew the login or the watch."""
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=8) as client, Client(url, call_timeout=8) as other:
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: client._core.registry.shared["etcd"].watcher._open_stream)
        other.ping()
        member.restart()
        other.ping()
        eventually(lambda: client._core.registry.shared["etcd"].watcher._open_stream)
        began = time.monotonic()
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 10)
        assert time.monotonic() - began < 3, "the break was not notified but found at the next renewal"


def test_revoked_permission_puts_a_lease_at_risk_then_loses_it(start_member, enable_users, eventually, etcdctl) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=1) as client:
        lease = client.lock("job", ttl=4).acquire()
        etcdctl(member, "user", "revoke-role", "app", "locks", user="root:top")
        eventually(lambda: lease.state == "AT_RISK", 4)
        with pytest.raises(ConfigError, match="permit"):
            client.lock("other").acquire()
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"
