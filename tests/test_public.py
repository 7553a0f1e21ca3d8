"""What programs outside this repository rely on: public names, equal APIs, the standard library alone."""

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
from leasehold import aio, blocking

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
    "Deadlocked",
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
    "telemetry",
    "versioned",
]

API_PAIRS = [
    (blocking.Client, aio.AsyncClient),
    (blocking.Lock, aio.AsyncLock),
    (blocking.RWLock, aio.AsyncRWLock),
    (blocking.Lease, aio.AsyncLease),
    (blocking.Schedule, aio.AsyncSchedule),
    (blocking.Status, aio.AsyncStatus),
    (blocking.MultiLock, aio.AsyncMultiLock),
    (blocking.Leases, aio.AsyncLeases),
    (blocking.Election, aio.AsyncElection),
    (blocking.Terms, aio.AsyncTerms),
]
each_api_pair = pytest.mark.parametrize(("api_class", "async_class"), API_PAIRS, ids=lambda each: each.__name__)

BLOCKING_ONLY = {"as_threading"}
# These call neither engine nor store.
NEVER_AWAITED = {
    "lock",
    "rwlock",
    "semaphore",
    "multilock",
    "any_of",
    "election",
    "locked",
    "read",
    "write",
    "lead",
    "observe",
}
NEVER_AWAITED |= {"__init__", "__iter__", "once_per", "release_on_signal", "schedule", "status"}

# ------------------------------------------------------------------------ names


def test_all_lists_the_public_names():
    assert leasehold.__all__ == NAMES


def test_version_matches_package_metadata():
    from importlib.metadata import version

    assert leasehold.__version__ == version("leasehold")


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(getattr(leasehold, name), "_fields")])
def test_help_of_named_tuple_shows_the_types_of_its_fields(name):
    assert "ForwardRef" not in str(inspect.signature(getattr(leasehold, name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring(name):
    value = getattr(leasehold, name)
    own = value.__doc__ if inspect.isfunction(value) else vars(value).get("__doc__")
    assert own, f"{name} has no docstring of its own"


@pytest.mark.parametrize("api_class", [api_class for pair in API_PAIRS for api_class in pair])
def test_every_public_method_has_a_docstring(api_class):
    methods = {
        name: member for name, member in vars(api_class).items() if inspect.isfunction(member) and name[0] != "_"
    }
    assert [name for name, method in methods.items() if not method.__doc__] == []


# --------------------------------------------------------- blocking and asyncio


def methods(api_class: type) -> dict[str, object]:
    """The methods that an API class defines itself. `__aenter__` counts as `__enter__`."""
    found = {name: member for name, member in vars(api_class).items() if inspect.isfunction(member)}
    return {re.sub("^__a(enter|exit|iter|next)__$", r"__\1__", name): member for name, member in found.items()}


def shape(method: Callable[..., object]) -> tuple[list[tuple[object, ...]], str]:
    signature = inspect.signature(method)
    parameters = [
        (p.name, p.kind, p.default, as_blocking_annotation(p.annotation)) for p in signature.parameters.values()
    ]
    return parameters, as_blocking_annotation(signature.return_annotation)


def as_blocking_annotation(annotation: object) -> str:
    """An annotation (text: both modules defer them) as the blocking API writes it. The asyncio API takes plain or
    async functions as arguments; `tests/typing` checks those types."""
    text = str(annotation).replace("Async", "")
    return "a function's" if re.search(r"\b(Any|Awaitable|Callable|Decorator|T)\b", text) else text


@each_api_pair
def test_blocking_and_async_api_have_the_same_methods(api_class, async_class):
    assert methods(api_class).keys() - BLOCKING_ONLY == methods(async_class).keys()


@each_api_pair
def test_blocking_and_async_api_have_the_same_signatures(api_class, async_class):
    for name, method in methods(async_class).items():
        assert shape(methods(api_class)[name]) == shape(method), name


@each_api_pair
def test_blocking_and_async_api_differ_only_in_what_is_awaited(api_class, async_class):
    assert not any(inspect.iscoroutinefunction(method) for method in methods(api_class).values())
    plain = {name for name, method in methods(async_class).items() if not inspect.iscoroutinefunction(method)}
    assert {name for name in plain if name in NEVER_AWAITED or name == "_lock"} == plain


def test_signature_comparison_detects_a_difference():
    class One:
        def renew(self, ttl: "float | None" = None) -> "leasehold.Lease": ...

    class Other:
        async def renew(self, ttl: "float | None" = 1.0) -> "leasehold.AsyncLease": ...

    class Same:
        async def renew(self, ttl: "float | None" = None) -> "leasehold.AsyncLease": ...

    assert shape(One.renew) != shape(Other.renew)
    assert shape(One.renew) == shape(Same.renew)


# ------------------------------------------------------------------- options


def lock_builders(client):
    return {
        "lock()": lambda **options: client.lock("a", **options),
        "semaphore()": lambda **options: client.semaphore("a", 2, **options),
        "multilock()": lambda **options: client.multilock(["a"], **options),
        "any_of()": lambda **options: client.any_of(["a"], **options),
        "election()": lambda **options: client.election("a", **options),
        "read()": lambda **options: client.rwlock("a").read(**options),
        "write()": lambda **options: client.rwlock("a").write(**options),
        "locked()": lambda **options: client.locked("a", **options)(print),
    }


LOCK_BUILDERS = ["lock()", "semaphore()", "multilock()", "any_of()", "election()", "read()", "write()", "locked()"]


@pytest.fixture(params=[leasehold.Client, leasehold.AsyncClient])
def client(request):
    client = request.param("memory://")
    yield client
    if request.param is leasehold.Client:
        client.close()
    else:
        asyncio.run(client.close())


@pytest.mark.parametrize("method", LOCK_BUILDERS)
def test_timeout_option_is_refused_with_hint_to_ttl_and_wait(client, method):
    with pytest.raises(TypeError, match=rf"{re.escape(method)} has no 'timeout': use ttl= .* wait= "):
        lock_builders(client)[method](timeout=3)


@pytest.mark.parametrize("method", LOCK_BUILDERS)
def test_misspelt_option_raises_type_error(client, method):
    with pytest.raises(TypeError, match=rf"{re.escape(method)} got an unexpected keyword argument 'tll'"):
        lock_builders(client)[method](tll=3)


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

LOCKING_PROGRAM = """
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


def test_both_clients_work_with_standard_library_only(tmp_path):
    (tmp_path / "leasehold").symlink_to(Path(leasehold.__file__).parent, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", LOCKING_PROGRAM, str(tmp_path)],  # -S: no site-packages
        env={key: value for key, value in os.environ.items() if not key.startswith("COV")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - sys.stdlib_module_names == {"leasehold", "__main__"}
