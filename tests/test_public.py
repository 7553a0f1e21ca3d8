"""What programs outside this repository rely on: the public names, the twins, the standard library alone."""

import asyncio
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import leasehold
from leasehold import aio, blocking, once_aio, once_blocking
from leasehold.many_aio import AsyncTerms
from leasehold.many_blocking import Terms

NAMES = [
    "AsyncClient",
    "AsyncElection",
    "AsyncLease",
    "AsyncLeases",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncRWLock",
    "AsyncSchedule",
    "AsyncStatus",
    "Client",
    "ConfigError",
    "Conflict",
    "CurrentLease",
    "Deadlock",
    "Election",
    "Event",
    "Holder",
    "Holding",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "LeaseholdError",
    "Leases",
    "Lock",
    "Mismatch",
    "MultiLock",
    "NotAcquired",
    "Outcome",
    "RWLock",
    "RunFailed",
    "Schedule",
    "SelfDeadlock",
    "StaleToken",
    "Status",
    "Term",
    "Traits",
    "Unavailable",
    "Unsupported",
    "advise_ttl",
    "current_lease",
    "fences",
    "optimistic",
    "optimistic_async",
    "versioned",
]

TWINS = [
    (blocking.Client, aio.AsyncClient),
    (blocking.Lock, aio.AsyncLock),
    (blocking.RWLock, aio.AsyncRWLock),
    (blocking.Lease, aio.AsyncLease),
    (once_blocking.OnceClient, once_aio.AsyncOnceClient),
    (once_blocking.Schedule, once_aio.AsyncSchedule),
    (once_blocking.Status, once_aio.AsyncStatus),
    (blocking.MultiLock, aio.AsyncMultiLock),
    (blocking.Leases, aio.AsyncLeases),
    (blocking.Election, aio.AsyncElection),
    (Terms, AsyncTerms),
]
both_twins = pytest.mark.parametrize(("face", "twin"), TWINS, ids=lambda each: each.__name__)

BLOCKING_ONLY = {"as_threading"}
# They ask neither engine nor store.
NEVER_AWAITED = {"lock", "rwlock", "semaphore", "multilock", "election", "locked", "read", "write", "lead", "observe"}
NEVER_AWAITED |= {"__init__", "__iter__", "once_per", "schedule", "status"}

# ------------------------------------------------------------------------ names


def test_the_public_names():
    assert leasehold.__all__ == NAMES


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert leasehold.__version__ == version("leasehold")


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_is(name):
    thing = getattr(leasehold, name)
    own = thing.__doc__ if inspect.isfunction(thing) else vars(thing).get("__doc__")
    assert own, f"{name} has no docstring of its own"


@pytest.mark.parametrize("face", [face for pair in TWINS for face in pair])
def test_every_method_says_what_it_promises(face):
    methods = {name: member for name, member in vars(face).items() if inspect.isfunction(member) and name[0] != "_"}
    assert [name for name, method in methods.items() if not method.__doc__] == []


# ------------------------------------------------------------------------ twins


def methods(face: type) -> dict[str, object]:
    """What a face adds to the code it shares with its twin; `__aenter__` counts as `__enter__`."""
    found = {name: member for name, member in vars(face).items() if inspect.isfunction(member)}
    return {re.sub("^__a(enter|exit|iter|next)__$", r"__\1__", name): member for name, member in found.items()}


def shape(method: Callable[..., object]) -> tuple[list[tuple[object, ...]], str]:
    signature = inspect.signature(method)
    parameters = [(p.name, p.kind, p.default, in_blocking_words(p.annotation)) for p in signature.parameters.values()]
    return parameters, in_blocking_words(signature.return_annotation)


def in_blocking_words(annotation: object) -> str:
    """An annotation (text: both modules defer them) as the blocking face writes it. Functions that are handed in may be
    plain or async on the other: those types are the business of `tests/typing`."""
    text = str(annotation).replace("Async", "")
    return "a function's" if re.search(r"\b(Any|Awaitable|Callable|Decorator|T)\b", text) else text


@both_twins
def test_twins_have_the_same_methods(face, twin):
    assert methods(face).keys() - BLOCKING_ONLY == methods(twin).keys()


@both_twins
def test_twins_have_the_same_signatures(face, twin):
    for name, method in methods(twin).items():
        assert shape(methods(face)[name]) == shape(method), name


@both_twins
def test_twins_differ_in_what_is_awaited_alone(face, twin):
    assert not any(inspect.iscoroutinefunction(method) for method in methods(face).values())
    plain = {name for name, method in methods(twin).items() if not inspect.iscoroutinefunction(method)}
    assert {name for name in plain if name in NEVER_AWAITED or name == "_lock"} == plain


def test_a_difference_between_twins_is_found():
    class One:
        def renew(self, ttl: "float | None" = None) -> "leasehold.Lease": ...

    class Other:
        async def renew(self, ttl: "float | None" = 1.0) -> "leasehold.AsyncLease": ...

    class Same:
        async def renew(self, ttl: "float | None" = None) -> "leasehold.AsyncLease": ...

    assert shape(One.renew) != shape(Other.renew)
    assert shape(One.renew) == shape(Same.renew)


# ------------------------------------------------------------------- options


def ways_to_build_a_lock(client):
    return {
        "lock()": lambda **options: client.lock("a", **options),
        "semaphore()": lambda **options: client.semaphore("a", 2, **options),
        "multilock()": lambda **options: client.multilock(["a"], **options),
        "election()": lambda **options: client.election("a", **options),
        "read()": lambda **options: client.rwlock("a").read(**options),
        "write()": lambda **options: client.rwlock("a").write(**options),
        "locked()": lambda **options: client.locked("a", **options)(print),
    }


WAYS = ["lock()", "semaphore()", "multilock()", "election()", "read()", "write()", "locked()"]


@pytest.fixture(params=[leasehold.Client, leasehold.AsyncClient])
def client(request):
    client = request.param("memory://")
    yield client
    if request.param is leasehold.Client:
        client.close()
    else:
        asyncio.run(client.close())


@pytest.mark.parametrize("where", WAYS)
def test_timeout_is_refused_by_naming_ttl_and_wait(client, where):
    with pytest.raises(TypeError, match=rf"{re.escape(where)} has no 'timeout': use ttl= .* wait= "):
        ways_to_build_a_lock(client)[where](timeout=3)


@pytest.mark.parametrize("where", WAYS)
def test_a_misspelt_option_is_a_type_error(client, where):
    with pytest.raises(TypeError, match=rf"{re.escape(where)} got an unexpected keyword argument 'tll'"):
        ways_to_build_a_lock(client)[where](tll=3)


def test_options_are_keyword_only(client):
    for call in (
        lambda: client.lock("a", 30),
        lambda: client.semaphore("a", 2, 30),
        lambda: client.rwlock("a").read(30),
        lambda: client.locked("a", "skip"),
        lambda: client.break_lock("a", 1),
        lambda: client.lock("a").acquire(0),
        lambda: type(client)("memory://", "namespace"),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


# ------------------------------------------------------- nothing but the standard library

LOCKING = """
import sys
sys.path.insert(0, sys.argv[1])
import asyncio, leasehold

with leasehold.Client("memory://shared") as client, client.lock("a", wait=0) as lease:
    lease.check()

async def main():
    async with leasehold.AsyncClient("memory://shared") as client, client.lock("a", wait=0) as lease:
        lease.check()

asyncio.run(main())
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_both_faces_work_where_nothing_else_is_installed(tmp_path):
    (tmp_path / "leasehold").symlink_to(Path(leasehold.__file__).parent, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", LOCKING, str(tmp_path)],  # -S: no site-packages
        env={key: value for key, value in os.environ.items() if not key.startswith("COV")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - sys.stdlib_module_names == {"leasehold", "__main__"}
