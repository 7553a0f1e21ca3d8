"""The pytest plugin as users run it: in a separate test run, with warnings as errors."""

import subprocess
import sys

import pytest

pytest_plugins = ("pytester",)

INI = """
[pytest]
filterwarnings = error
addopts = --strict-markers -p no:cacheprovider -p no:schemathesis -p no:hypothesispytest
"""


@pytest.fixture
def run_user_tests(pytester):
    pytester.makeini(INI)

    def run(text, *args, **outcomes):
        pytester.makepyfile(text)
        result = pytester.runpytest_subprocess(*args, timeout=280)
        if outcomes:
            result.assert_outcomes(**outcomes)
        return result

    return run


def test_fixtures_are_available_without_import(run_user_tests):
    run_user_tests(
        """
        import leasehold, pytest
        from leasehold.testing import expire

        def test_the_report_stops_when_its_lock_is_lost(leasehold_client, leasehold_clock):
            with pytest.raises(leasehold.LeaseLost):
                with leasehold_client.lock("report") as lease:
                    leasehold_clock.advance(3600)
                    assert lease.held
                    expire(lease)
        """,
        passed=1,
    )


def test_each_test_gets_its_own_engine(run_user_tests):
    run_user_tests(
        """
        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_it(leasehold_client, number):
            assert leasehold_client.inspect() == []
            global kept
            kept = leasehold_client.lock("job").acquire(wait=0)  # and whoever leaves it held is no nuisance
        """,
        passed=3,
    )


def test_blocking_and_async_clients_share_one_engine(run_user_tests):
    run_user_tests(
        """
        import asyncio

        def test_it(leasehold_client, leasehold_async_client):
            async def work():
                async with leasehold_async_client.lock("job"):
                    assert leasehold_client.lock("job").try_acquire() is None
            asyncio.run(work())
            assert leasehold_client.lock("job").acquire(wait=0).release()
        """,
        passed=1,
    )


def test_async_client_is_closed_in_any_state_of_its_loop(run_user_tests):
    run_user_tests(
        """
        import asyncio, pytest

        @pytest.fixture(scope="session")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            loop.close()

        @pytest.mark.parametrize("number", range(2))
        def test_open(leasehold_async_client, loop, number):
            global kept
            kept = loop.run_until_complete(leasehold_async_client.lock("job").acquire(wait=0))

        def test_closed(leasehold_async_client):
            async def work():
                global kept
                kept = await leasehold_async_client.lock("job").acquire(wait=0)
                task = asyncio.create_task(leasehold_async_client.lock("job").acquire())
                await asyncio.sleep(0.01)
                task.cancel()
            asyncio.run(work())

        def test_never_used(leasehold_async_client):
            pass
        """,
        passed=4,
    )


def test_plugin_leaves_no_threads_behind(run_user_tests):
    run_user_tests(
        """
        import threading, time
        from leasehold.testing import lose

        def test_it(leasehold_client):
            lease = leasehold_client.lock("job").acquire()
            lease.on_lost(print)
            lose(lease)

        def test_nothing_is_left():
            end = time.monotonic() + 5
            while [thread for thread in threading.enumerate() if "leasehold" in thread.name]:
                assert time.monotonic() < end
                time.sleep(0.01)
        """,
        passed=2,
    )


def test_conformance_suite_runs_on_a_registered_rig(run_user_tests):
    result = run_user_tests(
        """
        from leasehold.testing import RIGS, ClientPath, Rig, conformance_tests, register

        @register("mine")
        class MyRig(Rig):
            scheme = "memory"
            def client_path(self):
                return ClientPath("memory://mine")

        test_conformance = conformance_tests("mine")
        """,
        "-k",
        "exclusive_grant or when_paused",
        "-rs",
        "-v",
    )
    result.stdout.fnmatch_lines(
        [
            "*test_conformance?mine-blocking-exclusive_grant_excludes_other_claims? PASSED*",
            "*test_conformance?mine-asyncio-exclusive_grant_excludes_other_claims? PASSED*",
            "SKIPPED*memory: the rig does not have the ability 'pause'",
        ]
    )


def test_fixtures_option_shows_fixture_docstrings(run_user_tests):
    result = run_user_tests("", "--fixtures")
    result.stdout.fnmatch_lines(["leasehold_client -- *", "*blocking client on a memory engine*"])


def test_plugin_imports_nothing_until_used():
    loaded = ["suite", "cases", "choosing", "clock", "fate", "rig", "trial", "seat", "faces", "simulation"]
    code = f"""
import sys, leasehold.testing.plugin
print(*[name for name in {loaded} if "leasehold.testing." + name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_every_testing_name_is_exported():
    from leasehold import testing

    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        testing.nonsense  # noqa: B018


ONCE = """
    import os, time
    from pathlib import Path
    import leasehold, pytest

    FOLDER = Path({folder!r})

    def note(text):
        with open(FOLDER / "log", "a") as file:
            file.write(text + chr(10))

    def prepare(size):
        note(f"prepared {{os.getpid()}}")
        return {{"rows": size}}

    def fail():
        note("failed")
        raise ValueError("no disk")

    @pytest.fixture(scope="session")
    def database(leasehold_once):
        return leasehold_once("database", prepare, 7)

    @pytest.mark.parametrize("number", range(4))
    def test_prepared(database, number):
        note(f"test {{os.getpid()}}")
        assert database == {{"rows": 7}}

    @pytest.mark.parametrize("number", range(4))
    def test_failure(leasehold_once, number):
        with pytest.raises((ValueError, leasehold.RunFailed), match="no disk"):
            leasehold_once("broken", fail)
"""


@pytest.mark.extended
@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "each")], ids=["one process", "two workers"])
def test_leasehold_once_runs_once_and_reports_failure_to_all(run_user_tests, tmp_path, options):
    workers = 2 if options else 1
    run_user_tests(ONCE.format(folder=str(tmp_path)), *options, passed=8 * workers)
    notes = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert [notes.count(kind) for kind in ("prepared", "failed", "test")] == [1, 1, 4 * workers]


@pytest.mark.extended
def test_leasehold_once_runs_again_in_the_next_test_run(run_user_tests, tmp_path):
    for _ in range(2):
        base = f"--basetemp={tmp_path / 'base'}"
        run_user_tests(ONCE.format(folder=str(tmp_path)), "-k", "prepared", "-n", "1", base, passed=4)
    assert (tmp_path / "log").read_text().count("prepared") == 2


@pytest.mark.extended
def test_leasehold_once_is_repeated_by_another_worker_after_a_kill(run_user_tests, tmp_path):
    text = """
        import os
        from pathlib import Path

        FOLDER = Path({folder!r})

        def prepare():
            try:
                (FOLDER / "first").touch(exist_ok=False)
            except FileExistsError:
                return "prepared"
            os.kill(os.getpid(), 9)

        def test_a(leasehold_once):
            assert leasehold_once("database", prepare) == "prepared"

        test_b = test_c = test_d = test_a
    """
    result = run_user_tests(text.format(folder=str(tmp_path)), "-n", "2")
    result.assert_outcomes(passed=3, failed=1)  # xdist reports the test of the killed worker as failed
