"""Functions that run under a lock: `call` and the decorator."""

from __future__ import annotations

import pytest

from leasehold import ConfigError, NotAcquired

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_call_passes_lease_only_if_function_accepts_it(bench) -> None:
    lock = bench.client().lock("a")
    assert lock.call(lambda x, y=1: (x, y, lock.locked()), 2, y=3) == (2, 3, True)
    assert lock.call(lambda lease: lease.name) == "a"
    assert bench.client().with_lock("b", lambda lease: lease.state) == "HELD"
    assert lock.call(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        lock.call(lambda: 1 / 0)
    assert not lock.locked()


def test_blocking_client_refuses_coroutine_function(bench) -> None:
    async def later() -> None: ...

    with pytest.raises(ConfigError, match="AsyncClient"):
        bench.client().lock("a").call(later)
    with pytest.raises(ConfigError, match="AsyncClient"):
        bench.client().locked("a")(later)


def test_decorator_formats_name_from_arguments(bench) -> None:
    client = bench.client()
    seen: list[str] = []

    @client.locked("user:{user_id}:{extra[k]}", ttl=9)
    def work(user_id: int, *, lease: object = None, **extra: str) -> int:
        """Doc."""
        seen.extend(holding.name for holding in client.inspect())
        return user_id

    assert work(7, extra={"k": "v"}) == 7
    assert seen == ["user:7:v"]
    assert work.__doc__ == "Doc."


def test_decorator_supplies_the_lease_argument(bench) -> None:
    client = bench.client()

    @client.locked("fixed")
    def token(lease) -> int:
        return lease.token

    assert token() > 0


@pytest.mark.parametrize(("on_busy", "gives"), [("skip", None), ("raise", NotAcquired)])
def test_decorator_skips_or_raises_when_lock_is_busy(bench, on_busy, gives) -> None:
    client = bench.client()
    lease = client.lock("a").acquire()
    work = client.locked("a", on_busy=on_busy)(lambda: 1)
    if gives is None:
        assert work() is None
    else:
        with pytest.raises(gives):
            work()
    lease.release()
    assert work() == 1


def test_on_busy_skip_does_not_hide_not_acquired_of_another_lock(bench) -> None:
    client = bench.client()
    held = bench.client().lock("inner").acquire()

    @client.locked("outer", on_busy="skip")
    def work() -> None:
        client.lock("inner").acquire(wait=0)

    with pytest.raises(NotAcquired, match="inner"):
        work()
    held.release()


@pytest.mark.parametrize(
    ("template", "says"),
    [("u:{nobody}", "'nobody', which is not a parameter"), ("u:{}", "unnamed field"), ("u:{x", "not a valid name")],
)
def test_decorator_refuses_invalid_name_template(bench, template, says) -> None:
    with pytest.raises(ConfigError, match=says):
        bench.client().locked(template)(lambda x: x)


def test_decorator_refuses_invalid_options(bench) -> None:
    with pytest.raises(ConfigError, match="on_busy must be one of"):
        bench.client().locked("a", on_busy="maybe")(lambda: 1)
    with pytest.raises(TypeError, match="no 'timeout'"):
        bench.client().locked("a", timeout=3)(lambda: 1)
    with pytest.raises(ConfigError, match="ttl must be"):
        bench.client().locked("a", ttl=-1)(lambda: 1)
