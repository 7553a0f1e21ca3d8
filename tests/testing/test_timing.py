"""The two tiers of tests: what each does with a promise in seconds (tests/support/timing.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from hypothesis import HealthCheck, settings

from tests.support import timing
from tests.support.paths import child_environment

_CONFTEST = """
import tests.support.timing as timing

def pytest_configure(config):
    config.addinivalue_line("markers", "measured: set by the plug-in")
    config.pluginmanager.register(timing.MeasuredTests())
    timing.average_wait = lambda before, after: {wait}
"""

_BROKEN_PROMISE = """
import time
from tests.support.timing import check_elapsed

def test_promise():
    check_elapsed(time.monotonic() - 2, 1.5, "the answer was late")

def test_other():
    pass
"""

_SECOND_RUN_PASSES = """
import time
from tests.support.timing import check_elapsed

runs = []

def test_promise():
    runs.append(None)
    check_elapsed(time.monotonic() - 2, len(runs) * 1.5)
"""


def _run(folder: Path, source: str, *arguments: str, measure: bool = True, wait: float = 0.0) -> str:
    folder.joinpath("conftest.py").write_text(_CONFTEST.format(wait=wait))
    folder.joinpath("test_it.py").write_text(source)
    environment = child_environment(LEASEHOLD_MEASURE="1" if measure else "", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-c", "/dev/null", *arguments, "."]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_broken_promise_passes_in_the_first_tier(tmp_path: Path) -> None:
    assert "2 passed" in _run(tmp_path, _BROKEN_PROMISE, measure=False)


def test_broken_promise_fails_in_the_second_tier(tmp_path: Path) -> None:
    output = _run(tmp_path, _BROKEN_PROMISE)
    assert "1 failed, 1 passed" in output
    assert "took 2.00 s, promised: 1.50 s: the answer was late" in output


def test_busy_machine_skips_a_test_that_failed_twice(tmp_path: Path) -> None:
    output = _run(tmp_path, _BROKEN_PROMISE, wait=0.05)
    assert "1 passed, 1 skipped" in output
    assert "machine too busy: threads waited 50 ms for a processor" in output


def test_second_run_that_passes_is_reported(tmp_path: Path) -> None:
    output = _run(tmp_path, _SECOND_RUN_PASSES)
    assert "passed only in the second run" in output
    assert "1 passed" in output


def test_only_tests_with_a_promise_are_marked_measured(tmp_path: Path) -> None:
    assert "1 passed, 1 deselected" in _run(tmp_path, _BROKEN_PROMISE, "-m", "measured", measure=False)


def test_property_may_take_any_time_for_an_example() -> None:
    """Hypothesis fails an example that takes more than 0.2 s, and strategies that are slow: so does a busy machine."""
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def _short_call(make: Callable[..., object]) -> None:
    make("redis://server", call_timeout=0.5)


def _short_lease(make: Callable[..., object]) -> None:
    make("redis://server", ttl=0.5)


def _long_call(make: Callable[..., object]) -> None:
    make("redis://server", call_timeout=20, ttl=30)


def _call_through_a_helper(make: Callable[..., object]) -> None:
    _short_call(make)


class _Scenario:
    def __init__(self, make: Callable[..., object]) -> None:
        _short_call(make)
        make("redis://server", call_timeout=0.5)


def _call_through_a_class(make: Callable[..., object]) -> None:
    _Scenario(make)


def test_few_seconds_of_a_real_server_are_for_the_second_tier() -> None:
    marked: list[str] = []
    tests = {
        "tests/engines/redis/test_x.py::short": _short_call,
        "tests/engines/redis/test_x.py::lease": _short_lease,
        "tests/engines/redis/test_x.py::helper": _call_through_a_helper,
        "tests/engines/redis/test_x.py::class": _call_through_a_class,
        "tests/engines/redis/test_x.py::fixture": _long_call,
        "tests/engines/redis/test_x.py::long": _long_call,
        "tests/client/test_x.py::short": _short_call,
    }
    fixtures = {"tests/engines/redis/test_x.py::fixture": {"client": [SimpleNamespace(func=_short_call)]}}
    items = [
        SimpleNamespace(
            nodeid=name,
            function=test,
            add_marker=lambda _, name=name: marked.append(name),
            _fixtureinfo=SimpleNamespace(name2fixturedefs=fixtures.get(name, {})),
        )
        for name, test in tests.items()
    ]
    timing.MeasuredTests().pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert marked == list(tests)[:5]
