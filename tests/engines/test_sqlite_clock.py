"""Whose clock a file of leases goes by: after a restart, on another machine, in another time namespace."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leasehold import Client, ConfigError
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.sqlite.engine import SqliteEngine, opened
from leasehold.engines.sqlite.host import Host
from leasehold.model import Busy, Claim, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads

FAR = float("inf")


def on(host: Host):
    return lambda config, runtime, book: opened(config, runtime, book, host)


def engine(path: str, host: Host) -> SqliteEngine:
    runtime = Threads()
    config = EngineConfig.parse(f"sqlite://{path}", 5.0)
    return opened(config, runtime, Book(runtime, os.urandom(8).hex()), host)


def claim(mark: str, **more) -> Claim:
    return Claim("", "name", f"secret {mark}", mark, Holder(mark), 30.0, **more)


def test_after_a_restart_of_the_machine_every_lease_has_its_full_ttl_once_more(path) -> None:
    now = [5000.0]
    before = engine(path, Host("machine", "boot 1", "ns", lambda: now[0]))
    held = step(before.attempt(claim("a", delay=3.0), FAR))
    step(before.attempt(claim("b", queue=True), FAR))
    now[0] += 20
    now[0] = 7.0
    after = engine(path, Host("machine", "boot 2", "ns", lambda: now[0]))
    first, second = step(after.inspect("", "name", True, FAR))
    assert (first.state, first.token, first.left) == ("held", held.token, 30.0)
    assert (second.state, second.left) == ("waiting", 15.0)
    now[0] = 7.0 + 30.0 + 2.9
    assert isinstance(step(after.attempt(claim("c"), FAR)), Busy)  # its delay counts too
    now[0] = 7.0 + 30.0 + 3.1
    assert step(after.attempt(claim("c"), FAR)).token > held.token
    for one in (before, after):
        step(one.close())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Host("another machine", "boot 2", "ns"), "another machine"),
        (Host("machine", "boot 1", "another ns"), "another time namespace"),
    ],
)
def test_live_leases_of_another_clock_are_refused(path, other, says) -> None:
    here = Host("machine", "boot 1", "ns")
    with Client(f"sqlite://{path}", engine=on(here)) as client:
        with client.lock("a"), Client(f"sqlite://{path}", engine=on(other)) as far:
            with pytest.raises(ConfigError, match=says):
                far.lock("b").acquire()
            with pytest.raises(ConfigError, match=says):
                far.ping()
        # Nothing is live, so the file is theirs now: the first client notices, though it has it open.
        with (
            Client(f"sqlite://{path}", engine=on(other)) as far,
            far.lock("b"),
            pytest.raises(ConfigError, match="another"),
        ):
            client.lock("b").acquire()
        with client.lock("b", wait=0):
            pass


SHIFTED = """
import sys
from leasehold import Client, ConfigError
with Client(f"sqlite://{sys.argv[1]}") as client:
    try:
        with client.lock("b"):
            print("taken")
    except ConfigError as error:
        print(error)
"""


def test_a_real_time_namespace_is_told_apart(path) -> None:
    unshare = ["unshare", "-T", "--fork", "--boottime", "1000"]
    if os.getuid() != 0 or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root for a time namespace; the rule itself is shown without")

    def shifted() -> str:
        command = [*unshare, sys.executable, "-c", SHIFTED, path]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    with Client(f"sqlite://{path}") as client:
        with client.lock("a"):
            assert "another time namespace" in shifted()
        assert shifted() == "taken\n"
        with client.lock("a"):  # and back again
            pass


def test_containers_with_ids_of_their_own_share_the_boot(path) -> None:
    with (
        Client(f"sqlite://{path}", engine=on(Host("one", "boot", "ns"))) as one,
        Client(f"sqlite://{path}", engine=on(Host("two", "boot", "ns"))) as two,
        one.lock("a"),
    ):
        assert two.lock("a").try_acquire() is None


def test_this_host_is_known() -> None:
    host = Host.here()
    assert host.boot
    assert host.stamp == Host.here().stamp
    assert abs(Host.here().clock() - host.clock()) < 5
