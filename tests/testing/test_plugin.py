"""The pytest plugin as users meet it: in a test run of its own, with warnings as errors."""

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
def users(pytester):
    pytester.makeini(INI)

    def run(text, *args, **outcomes):
        pytester.makepyfile(text)
        result = pytester.runpytest_subprocess(*args)
        if outcomes:
            result.assert_outcomes(**outcomes)
        return result

    return run


def test_fixtures_are_there_without_an_import(users):
    users(
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


def test_every_test_has_an_engine_of_its_own(users):
    users(
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


def test_both_faces_meet_on_one_engine(users):
    users(
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


def test_an_async_client_is_closed_in_whatever_state_its_loop_is(users):
    users(
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


def test_no_thread_stays_behind(users):
    users(
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


def test_an_engine_author_runs_the_suite(users):
    result = users(
        """
        from leasehold.testing import RIGS, Machine, Rig, conformance, register

        @register("mine")
        class MyRig(Rig):
            scheme = "memory"
            def machine(self):
                return Machine("memory://mine")

        test_conformance = conformance("mine")
        """,
        "-k",
        "exclusive_grant or a_paused_engine",
        "-rs",
        "-v",
    )
    result.stdout.fnmatch_lines(
        [
            "*test_conformance?mine-blocking-an_exclusive_grant_stands_alone? PASSED*",
            "*test_conformance?mine-asyncio-an_exclusive_grant_stands_alone? PASSED*",
            "SKIPPED*memory: the rig does not have the ability 'pause'",
        ]
    )


def test_the_fixtures_describe_themselves(users):
    result = users("", "--fixtures")
    result.stdout.fnmatch_lines(["leasehold_client -- *", "*blocking client on a memory engine*"])


def test_the_plugin_loads_nothing_until_it_is_used():
    loaded = ["suite", "cases", "choosing", "clock", "fate", "rig", "trial", "seat", "faces", "simulation"]
    code = f"""
import sys, leasehold.testing.plugin
print(*[name for name in {loaded} if "leasehold.testing." + name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_every_name_is_exported():
    from leasehold import testing

    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        testing.nonsense  # noqa: B018
