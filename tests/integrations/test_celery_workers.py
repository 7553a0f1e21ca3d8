"""`singleton` in real Celery workers of every pool, with a real broker, on three engines."""

import os
import time

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from harness.rigs.redis import single_server
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseLost, Unavailable
from leasehold.integrations.celery import client
from tests.support.celery_workers import Shop
from tests.support.client_fixtures import poll_until

pytestmark = pytest.mark.extended

WITHIN = 120  # seconds, far beyond what any of it takes


def held(shop: Shop, name: str) -> float | None:
    """How long the lease of a name lives unless renewed."""
    return next((h.left for h in client(shop.app).inspect(name, exact=True) if h.state == "held"), None)


def wait_for_renewal(shop: Shop, name: str) -> None:
    last = held(shop, name)
    end = time.monotonic() + WITHIN
    while (now := held(shop, name)) is not None and now <= last and time.monotonic() < end:
        last = now
        time.sleep(0.05)
    assert now is not None and now > last  # noqa: PT018


@pytest.fixture
def shop(tmp_path, request):
    shop = Shop(tmp_path, request.param)
    yield shop
    client(shop.app).close()
    shop.app.close()


POOLS = [
    ("prefork", "postgresql"),
    ("threads", "sqlite"),
    ("gevent", "redis"),
    ("eventlet", "redis"),
    ("solo", "sqlite"),
]
FURTHER = [
    pytest.param(pool, engine, marks=pytest.mark.faults)
    for pool in ("prefork", "threads", "gevent", "eventlet", "solo")
    for engine in ("sqlite", "redis", "postgresql")
    if (pool, engine) not in POOLS
]


@pytest.mark.parametrize(("pool", "shop"), [*POOLS, *FURTHER], indirect=["shop"])
def test_workers_of_every_pool_run_one_task_at_a_time(pool, shop) -> None:
    with shop.workers(pool, count=2 if pool == "solo" else 1):
        for result in [shop.send("enter", "a") for _ in range(12)]:
            result.get(timeout=WITHIN)
        entered = shop.notes()
        assert len(entered) == 24
        assert all(entered[n + 1] == ["out", token] for n, (_, token) in enumerate(entered) if n % 2 == 0)
        tokens = [int(token) for _, token in entered[::2]]
        assert tokens == sorted(set(tokens))

        holder = shop.send("hold", "b")
        poll_until(lambda: shop.notes("held"), WITHIN)
        wait_for_renewal(shop, "b")  # in the background, while the task works
        assert shop.send("skip", "b").get(timeout=WITHIN) is None
        (shop.folder / "go").touch()
        assert holder.get(timeout=WITHIN) == int(shop.notes("held")[0][1])
        assert shop.send("skip", "b").get(timeout=WITHIN) == "ran"
        assert client(shop.app).inspect() == []


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_busy_tasks_are_retried_coalesced_and_chained(shop) -> None:
    with shop.workers("threads"):
        holder = shop.send("hold", "a")
        poll_until(lambda: shop.notes("held"), WITHIN)
        retried = shop.send("retry", "a")
        skip, pair = shop.app.tasks["skip"], shop.app.tasks["pair"]
        assert chain(skip.s("a"), pair.s("next")).apply_async().get(timeout=WITHIN) == [None, "next"]
        poll_until(lambda: retried.state == "RETRY", WITHIN)
        (shop.folder / "go").touch()
        holder.get(timeout=WITHIN)
        assert retried.get(timeout=WITHIN) == "ran"
        assert shop.notes("retried") == [["retried", "0"]]  # none of the retries that the task may make itself

        first = shop.send("coalesce", "b", "go1")
        poll_until(lambda: shop.notes("began") == [["began", "go1"]], WITHIN)
        second = shop.send("coalesce", "b", "go2")
        poll_until(lambda: client(shop.app).inspect("b#queued", exact=True), WITHIN)
        burst = [shop.send("coalesce", "b", "go3") for _ in range(5)]
        assert [result.get(timeout=WITHIN) for result in burst] == [None] * 5
        (shop.folder / "go1").touch()
        assert first.get(timeout=WITHIN) == "go1"
        poll_until(lambda: shop.notes("began") == [["began", "go1"], ["began", "go2"]], WITHIN)
        third = shop.send("coalesce", "b", "go2")  # the second has begun: this one runs after it
        poll_until(lambda: client(shop.app).inspect("b#queued", exact=True), WITHIN)
        (shop.folder / "go2").touch()
        assert [second.get(timeout=WITHIN), third.get(timeout=WITHIN)] == ["go2", "go2"]
        assert client(shop.app).inspect() == []


@pytest.mark.parametrize("shop", ["redis", pytest.param("postgresql", marks=pytest.mark.faults)], indirect=True)
def test_killed_task_that_is_delivered_again_runs_after_its_ttl(shop) -> None:
    with shop.workers("prefork"):
        assert shop.send("killed", "a").get(timeout=WITHIN) == "ran"
    (_, first), (_, second) = shop.notes("killed")
    assert int(first) < int(second)


def test_lost_lease_and_silent_engine_fail_the_task_with_their_fields(tmp_path) -> None:
    """The broker and the results stay reachable: the engine alone is behind the proxy."""
    proxy = Proxy(single_server()[0].port)
    engine = {"url": f"redis://127.0.0.1:{proxy.port}", "namespace": tmp_path.name + os.urandom(4).hex()}
    shop = Shop(tmp_path, "redis", leasehold={**engine, "ttl": 60, "call_timeout": 5})
    direct = Client(f"redis://127.0.0.1:{single_server()[0].port}", namespace=engine["namespace"])
    try:
        with shop.workers("threads"):
            broken = shop.send("hold", "a", kwargs={"until": "never"})
            poll_until(lambda: shop.notes("held"), WITHIN)
            token = int(shop.notes("held")[0][1])
            direct.break_lock("a", token=token)
            with pytest.raises(LeaseLost) as lost:
                broken.get(timeout=WITHIN)
            assert (lost.value.name, lost.value.reason, lost.value.token) == ("a", "broken", token)

            kept = shop.send("hold", "b", kwargs={"until": "go"})
            poll_until(lambda: len(shop.notes("held")) == 2, WITHIN)
            proxy.cut()
            refused = shop.send("skip", "c")
            with pytest.raises(Unavailable) as silent:
                refused.get(timeout=WITHIN)
            assert silent.value.engine == "redis"
            assert shop.notes("ran") == []
            (shop.folder / "go").touch()  # within the ttl: the task succeeds, and its name expires
            assert kept.get(timeout=WITHIN) == int(shop.notes("held")[1][1])
            proxy.restore()
            poll_until(lambda: direct.inspect() == [], WITHIN)
    finally:
        client(shop.app).close()
        shop.app.close()
        direct.close()
        proxy.close()


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_task_holds_its_name_from_sending_to_its_end(shop) -> None:
    queued = [shop.send("send", name) for name in ("a", "a", "a")]
    assert len({result.id for result in queued}) == 1
    revoked = shop.send("send", "b", countdown=600)
    expired = shop.send("send", "c", expires=0.01)
    with shop.workers("threads"):
        assert queued[0].get(timeout=WITHIN) == "a"
        poll_until(lambda: held(shop, "a#queued") is held(shop, "a") is None, WITHIN)
        later = shop.send("send", "a", 0, "go")
        assert later.id != queued[0].id
        poll_until(lambda: held(shop, "a") is not None, WITHIN)
        assert shop.send("send", "a").id == later.id  # it runs
        (shop.folder / "go").touch()
        assert later.get(timeout=WITHIN) == "a"

        assert shop.send("send", "d", 2).get(timeout=WITHIN) == "d"
        assert shop.notes("sent d") == [["sent", "d", str(number)] for number in range(3)]  # a retry is not skipped

        revoked.revoke()
        poll_until(lambda: held(shop, "c#queued") is None, WITHIN)
        with pytest.raises(TaskRevokedError):
            expired.get(timeout=WITHIN)
        assert shop.send("send", "c").get(timeout=WITHIN) == "c"
        assert held(shop, "b#queued") is not None  # a worker drops a revoked task when it is due
        poll_until(lambda: [h.name for h in client(shop.app).inspect()] == ["b#queued"], WITHIN)
