"""Functions that run under a lock: `call` and the decorator."""

from __future__ import annotations

import functools
import inspect
from typing import get_type_hints

import pytest
from _pytest.compat import getfuncargnames

from leasehold import AsyncClient, Client, ConfigError, Lease, NotAcquired

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


def test_blocking_client_refuses_coroutine_that_a_plain_function_returns() -> None:
    async def later(_: object = None) -> None: ...

    def plain(_: object = None) -> object:
        return later()

    with Client("memory://") as client:
        for refuse in (client.locked("a")(plain), functools.partial(client.lock("a").call, plain)):
            with pytest.raises(ConfigError, match="plain returned a coroutine"):
                refuse()
        for _ in range(2):
            with pytest.raises(ConfigError, match="plain returned a coroutine"):
                client.once("a", plain, {"password": "secret"})
        assert client.outcome("a").state == "failed"


def test_generator_function_is_refused_as_it_would_run_unlocked() -> None:
    def rows():
        yield 1

    async def async_rows():
        yield 1

    client, async_client = Client("memory://"), AsyncClient("memory://")
    for refuse in (
        client.locked("a"),
        client.once_per("a"),
        async_client.locked("a"),
        async_client.once_per("a"),
        client.lock("a").call,
        functools.partial(client.once, "a"),
    ):
        for function in (rows, async_rows, functools.partial(rows)):
            with pytest.raises(ConfigError, match="generator"):
                refuse(function)
    assert client.outcome("a") is None
    client.close()


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


# -------------------------------------------------------------- signature


@pytest.mark.parametrize("client_type", [Client, AsyncClient])
@pytest.mark.parametrize("decorator", ["locked", "once_per"])
def test_decorated_signature_has_no_lease(client_type, decorator) -> None:
    @getattr(client_type("memory://"), decorator)("user/{user_id}")
    def charge(user_id: int, lease: Lease, *, amount: float = 1.0) -> str:
        """Charge a user."""
        return f"{user_id} {amount}"

    assert getfuncargnames(charge) == ("user_id",), "what pytest would pass"
    assert str(inspect.signature(charge)) == "(user_id: int, *, amount: float = 1.0) -> str"
    assert get_type_hints(charge) == {"user_id": int, "amount": float, "return": str}
    assert (charge.__name__, charge.__doc__) == ("charge", "Charge a user.")
    assert inspect.iscoroutinefunction(charge) is (client_type is AsyncClient)


def test_decorated_signature_keeps_annotations_that_cannot_be_evaluated(bench) -> None:
    @bench.client().locked("a")
    def work(lease: Lease, when: NotDefined) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert str(inspect.signature(work)) == "(when: 'NotDefined') -> 'None'"


def test_lease_is_passed_wherever_the_function_takes_it(url) -> None:
    client = Client(url)

    def first(lease, a, b=2):
        return lease.held, a, b

    def last(a, b=2, lease=None):
        return lease.held, a, b

    def positional(lease, /, a, b=2):
        return lease.held, a, b

    def keyword(a, b=2, *, lease):
        return lease.held, a, b

    for fn in (first, last, positional, keyword):
        decorated = client.locked("b/{a}")(fn)
        assert decorated(1) == decorated(a=1) == (True, 1, 2)
        assert decorated(1, 3) == decorated(1, b=3) == decorated(b=3, a=1) == (True, 1, 3)
        assert client.with_lock("b", fn, 1, 3) == (True, 1, 3)
        assert client.once_per(f"{fn.__name__}/{{a}}")(fn)(1) == [True, 1, 2]
        client.lock("c").call(fn, a=1)

    class Account:
        @client.locked("account/{amount}")
        def charge(self, lease, amount):
            return self, lease.held, amount

    account = Account()
    assert account.charge(7) == account.charge(amount=7) == (account, True, 7)
    client.close()


def test_lease_given_by_the_caller_is_refused(bench) -> None:
    decorated = bench.client().locked("d")(lambda a, lease: lease)
    with pytest.raises(TypeError, match="leave it out"):
        decorated(1, lease=None)
