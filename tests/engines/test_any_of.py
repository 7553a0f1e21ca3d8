"""`any_of` on real servers: many threads, and processes that are killed while they wait in all queues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from leasehold.core.timing import WAITER_TTL
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe

ENGINES = ["sqlite", "postgresql", "mysql", "redis", "redlock", "etcd", "zookeeper", "http-redis-pair"]
NAMES = ["gpu0", "gpu1", "gpu2"]

pytestmark = pytest.mark.extended


@pytest.fixture
def rig(request) -> Iterator[Rig]:
    found = rig_or_skip(rig_type(request.param))
    yield found
    found.close()


@pytest.fixture
def namespace() -> str:
    return f"test-{os.urandom(6).hex()}"


@pytest.mark.parametrize("rig", ENGINES, indirect=True)
def test_threads_that_share_a_pool_never_share_a_name(rig, namespace, wait_until) -> None:
    inside, errors = dict[str, int](), list[BaseException]()
    options = {"namespace": namespace, "call_timeout": 30}
    with rig.client(**options) as one, rig.client(**options) as two:

        def work(number: int) -> None:
            try:
                for _ in range(4):
                    with (one, two)[number % 2].any_of(NAMES, wait=120) as lease:
                        assert inside.setdefault(lease.name, number) == number, f"{lease.name} has two holders"
                        del inside[lease.name]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert errors == []
        wait_until(lambda: one.inspect() == [], 30)  # callers do not wait until they have left the other queues


SCRIPT = """
import sys, leasehold
client = leasehold.Client(sys.argv[1], namespace=sys.argv[2], ttl=2, call_timeout=30)
client.any_of(sys.argv[3:]).acquire()
"""


@pytest.mark.parametrize("rig", ["redis"], indirect=True)
def test_killed_waiter_of_a_pool_holds_up_no_queue(rig, namespace, wait_until) -> None:
    with rig.client(namespace=namespace, call_timeout=30) as client:
        leases = [client.lock(name, ttl=60).acquire() for name in NAMES]
        child = subprocess.Popen([sys.executable, "-c", SCRIPT, probe.config(client).url, namespace, *NAMES])
        try:
            wait_until(lambda: sum(holding.state == "waiting" for holding in client.inspect()) == 3, 60)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(30)
        for lease in leases:
            lease.release()
        began = time.monotonic()
        with client.multilock(NAMES, wait=WAITER_TTL + 30) as again:
            assert again.held
        print(f"{time.monotonic() - began:.1f} s")
