"""Access control: the least a role needs, tokens that end, rights that are taken away."""

from __future__ import annotations

import time
from functools import partial

import pytest

from leasehold import Client, ConfigError
from leasehold.runtime.base import step
from leasehold.testing.servers.etcd import Etcd


@pytest.fixture
def with_users(ctl):
    return partial(make_users, ctl)


def make_users(ctl, member: Etcd, prefix: str) -> str:
    """A server with users, and a role that may do what locks need and no more: what docs/guarantees/etcd.md says."""
    ctl(member, "user", "add", "root:top")
    ctl(member, "role", "add", "locks")
    ctl(member, "role", "grant-permission", "--prefix=true", "locks", "readwrite", f"{prefix}/lh1/")
    ctl(member, "user", "add", "app:s3cr:t/?")
    ctl(member, "user", "grant-role", "app", "locks")
    ctl(member, "user", "grant-role", "root", "root")
    ctl(member, "auth", "enable")
    return f"etcd://app:s3cr%3At%2F%3F@127.0.0.1:{member.port}/{prefix}"


def test_the_least_a_role_needs(single, with_users, eventually, in_line) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url) as client, Client(url) as other:
        client.ping()
        lease = client.lock("job").acquire()
        waiting = in_line(other)
        lease.renew(60)
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 2)
        waiting.granted(20)
        with client.semaphore("s", 2), client.rwlock("r").read(), client.lock("d", delay=1):
            pass
        with client.lock("m", min_hold=2):
            pass
        step(client._rebase(0))
    with pytest.raises(ConfigError) as denied, Client(url.replace("/app", "/elsewhere")) as client:
        client.lock("job").acquire()
    assert "s3cr" not in str(denied.value)
    for wrong in (f"etcd://app:wrong@127.0.0.1:{member.port}/app", f"etcd://127.0.0.1:{member.port}/app"):
        with pytest.raises(ConfigError), Client(wrong) as client:
            client.lock("job").acquire()


def test_a_user_where_there_are_none_is_a_config_error(single) -> None:
    with pytest.raises(ConfigError), Client(f"etcd://app:pw@127.0.0.1:{single().port}") as client:
        client.ping()


def test_a_token_that_ended_is_replaced_without_a_word(single, with_users, in_line, ctl) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url, call_timeout=8) as client, Client(url, call_timeout=8) as other:
        lease = client.lock("job", ttl=30).acquire()
        waiting = in_line(other)
        member.restart()  # it forgets all tokens
        lease.verify()
        ctl(member, "user", "add", "somebody:x", user="root:top")  # and now they are of an older time
        lease.verify()
        assert lease.release()
        waiting.granted(20)


def test_a_watch_refused_for_an_old_login_begins_anew(single, with_users, eventually) -> None:
    """etcd refuses it on the stream, which stays open: nothing else would renew the login, or the watch."""
    member = single()
    url = with_users(member, "app")
    with Client(url, call_timeout=8) as client, Client(url, call_timeout=8) as other:
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: client._desk.book.shelf["etcd"].watcher._live)
        other.ping()
        member.restart()
        other.ping()
        eventually(lambda: client._desk.book.shelf["etcd"].watcher._live)
        began = time.monotonic()
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 10)
        assert time.monotonic() - began < 3, "told, and not found at the next renewal"


def test_a_right_revoked_while_it_is_held_puts_at_risk_and_then_loses(single, with_users, eventually, ctl) -> None:
    member = single()
    url = with_users(member, "app")
    with Client(url, call_timeout=1) as client:
        lease = client.lock("job", ttl=4).acquire()
        ctl(member, "user", "revoke-role", "app", "locks", user="root:top")
        eventually(lambda: lease.state == "AT_RISK", 4)
        with pytest.raises(ConfigError, match="permit"):
            client.lock("other").acquire()
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"
