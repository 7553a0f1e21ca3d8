"""The pytest plugin as users run it: in a separate test run, with warnings as errors."""

import subprocess
import sys

import pytest

pytest_plugins = ("pytester",)

INI = """
[pytest]
filterwarnings = error
addopts = --strict-markers -p no:cacheprovider
"""


@pytest.fixture
def run_user_tests(pytester):
    pytester.makeini(INI)

    def run(text, *args, **outcomes):
        pytester.makepyfile(text)
        result = pytester.runpytest_subprocess(*args, timeout=120)
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
