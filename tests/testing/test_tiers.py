"""Which tests over all engines run in both runtimes (tests/support/tiers.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.tiers import OneRuntimePerEngine

CONFORMANCE = "tests/conformance/test_conformance.py::test_x"


def runtimes_left(*nodeids: str) -> list[str]:
    """The tests that are not left to `make faults`."""
    marked: list[str] = []
    items = [SimpleNamespace(nodeid=name, add_marker=lambda _, name=name: marked.append(name)) for name in nodeids]
    OneRuntimePerEngine().pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    return [name for name in nodeids if name not in marked]


def both(engine: str, case: str, path: str = CONFORMANCE) -> list[str]:
    return [f"{path}[{engine}-{runtime}-{case}]" for runtime in ("blocking", "asyncio")]


def test_test_over_engines_runs_in_one_runtime_per_engine() -> None:
    left = runtimes_left(*(name for engine in ("redis", "mysql", "etcd", "sqlite") for name in both(engine, "case")))
    assert [name.partition("[")[2].partition("-")[0] for name in left] == ["redis", "mysql", "etcd", "sqlite"]
    assert {"blocking" in name for name in left} == {True, False}


@pytest.mark.parametrize(
    "names",
    [
        both("memory", "case"),
        both("redis", "case")[:1],  # it has only one runtime
        both("redis", "case", "tests/engines/redis/test_engine.py::test_x"),
        [f"{CONFORMANCE}[redis-case]"],
    ],
    ids=["memory", "one runtime", "one engine", "no runtime"],
)
def test_other_tests_stay_where_they_are(names: list[str]) -> None:
    assert runtimes_left(*names) == names


def test_health_probe_of_an_engine_is_tested_in_one_runtime() -> None:
    path = "tests/engines/redis/test_health.py::test_x"
    assert len(runtimes_left(f"{path}[blocking]", f"{path}[asyncio]")) == 1


def test_lock_server_over_memory_is_not_the_memory_engine() -> None:
    assert len(runtimes_left(*both("http-memory", "case"))) == 1
