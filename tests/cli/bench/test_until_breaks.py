"""`bench --until-breaks`: open-loop load, the breaking point, and nothing left behind."""

import asyncio
import signal
import time
from collections import Counter

import pytest

from leasehold import Client, Unavailable
from leasehold.cli.bench import load_worker
from leasehold.cli.bench.load_worker import LoadGenerator, StepResult
from leasehold.cli.bench.until_breaks import MachineTimes, client_processes, summarize
from tests.support import probe_cli
from tests.support.client_fixtures import poll_until


class StallingEngine:
    """As much of a client as a load generator needs. Every acquire waits until `pairs` of them have begun."""

    def __init__(self, pairs):
        self.pairs, self.begun, self.go, self.name = pairs, 0, asyncio.Event(), ""

    def lock(self, _name, *, wait):
        return self

    async def acquire(self):
        self.begun += 1
        if self.begun == self.pairs:
            self.go.set()
        await self.go.wait()
        return self

    async def release(self):
        """Succeed at once."""


def test_pairs_start_when_due_and_are_timed_from_then(monkeypatch):
    """A closed loop would wait for the first answer for ever, and then time the other pairs from their own start."""
    monkeypatch.setattr(load_worker, "GRACE", 60.0)

    async def run():
        engine = StallingEngine(20)
        return await LoadGenerator(engine, "").run_step(100.0, 0.2, asyncio.get_running_loop().time())

    result = asyncio.run(run())
    micros = sorted(Counter(result.latencies).elements(), reverse=True)
    assert (result.due, len(micros), result.errors) == (20, 20, {})
    # The last one was due 190 ms after the first, and all ended after that. Latencies are rounded.
    assert all(1.004 * each + 10_000 * number >= 190_000 for number, each in enumerate(micros))


@pytest.mark.extended  # the pair must begin within a second
def test_late_pair_is_finished_but_does_not_count(monkeypatch):
    """If it was cancelled, its release would burden the next step."""
    monkeypatch.setattr(load_worker, "GRACE", 0.0)
    monkeypatch.setattr(*probe_cli.DRAIN_SECONDS, 60.0)

    async def run():
        engine = StallingEngine(2)  # no second pair comes
        asyncio.get_running_loop().call_later(1.2, engine.go.set)
        generator = LoadGenerator(engine, "")
        return await generator.run_step(1.0, 1.0, asyncio.get_running_loop().time()), generator

    result, generator = asyncio.run(run())
    assert (result.due, result.latencies, result.errors) == (1, {}, {})
    assert len(probe_cli.free_locks(generator)) == 1


@pytest.mark.parametrize(("held_seconds", "expected"), [(3600.0, ["run/1", "run/2"]), (0.0, ["run/1", "run/1"])])
def test_name_of_failed_pair_is_used_again_once_it_must_be_free(monkeypatch, held_seconds, expected):
    monkeypatch.setattr(load_worker, "GRACE", 60.0)
    monkeypatch.setattr(*probe_cli.FAILED_NAME_SECONDS, held_seconds)
    monkeypatch.setattr(*probe_cli.FAILED_PAIR_SECONDS, 0.0)
    names = []

    class FailingEngine(StallingEngine):
        def lock(self, name, *, wait):
            names.append(name)
            self.name = name
            return self

        async def acquire(self):
            raise Unavailable("no answer")

    async def run():
        generator = LoadGenerator(FailingEngine(0), "run/")
        return [await generator.run_step(20.0, 0.05, asyncio.get_running_loop().time()) for _ in range(2)]

    assert [list(result.errors) for result in asyncio.run(run())] == [["Unavailable: no answer"]] * 2
    assert names == expected


def test_few_texts_of_errors_are_kept(monkeypatch):
    monkeypatch.setattr(load_worker, "GRACE", 60.0)
    monkeypatch.setattr(*probe_cli.MAX_ERROR_TEXTS, 3)
    monkeypatch.setattr(*probe_cli.FAILED_PAIR_SECONDS, 0.0)

    class FailingEngine(StallingEngine):
        async def acquire(self):
            self.begun += 1
            raise Unavailable(f"no answer to call {self.begun}")

    result = asyncio.run(LoadGenerator(FailingEngine(0), "").run_step(1000.0, 0.01, time.monotonic()))
    assert (len(result.errors), sum(result.errors.values()), result.errors["Unavailable"]) == (4, 10, 7)


def test_server_that_refuses_everything_takes_few_names(monkeypatch):
    """It takes no time to refuse: the names of a soak's outages, each kept for 40 seconds, were its growth."""
    monkeypatch.setattr(load_worker, "GRACE", 0.0)
    monkeypatch.setattr(*probe_cli.DRAIN_SECONDS, 0.0)
    monkeypatch.setattr(*probe_cli.MAX_RUNNING, 3)
    monkeypatch.setattr(*probe_cli.FAILED_PAIR_SECONDS, 3600.0)

    class RefusingEngine(StallingEngine):
        async def acquire(self):
            self.begun += 1
            raise Unavailable("refused")

    engine = RefusingEngine(0)
    result = asyncio.run(LoadGenerator(engine, "").run_step(1000.0, 0.1, time.monotonic()))
    assert engine.begun == sum(result.errors.values()) <= 3


def test_pair_that_is_not_done_in_time_counts_as_slowest():
    results = [StepResult(100, {1000: 96}, {"Unavailable: gone": 2}, 0.5), StepResult(100, {2000: 100}, {}, 0.7)]
    step = summarize(100.0, 2.0, results, MachineTimes(0, 0, 0), MachineTimes(1000, 400, 100))
    assert (step.p50, step.p95, step.p99) == (2.0, 2.0, 3000.0)
    assert (step.done, step.errors, step.error) == (98.0, 0.01, "Unavailable: gone")
    assert (step.client_cpu, step.machine_cpu, step.disk_wait) == (0.7, 0.6, 0.1)


def test_step_keeps_few_latencies_however_many_pairs_it_has():
    result, expected = StepResult(10_000), [1_000 + 70 * number for number in range(10_000)]
    for micros in expected:
        result.add(micros)
    assert len(result.latencies) < 1_300
    kept = sorted(Counter(result.latencies).elements())
    assert all(abs(kept - micros) <= 0.004 * micros for kept, micros in zip(kept, expected, strict=True))


@pytest.mark.parametrize("rank", [0, 1, 4, 5, 8, 9])
def test_percentiles_of_rounded_latencies_are_those_of_the_list(rank):
    micros = [10, 10, 20, 30, 30, 30, 40, 50, 50, 60]
    result = StepResult(10, dict(Counter(micros)))
    step = summarize(1.0, 10.0, [StepResult(10, {1: rank}), result], None, None)
    listed = sorted([1] * rank + micros)
    assert [step.p50, step.p95] == [(listed[index] / 1000 if index < len(listed) else 11_000) for index in (10, 19)]


def test_bench_until_breaks_names_the_breaking_point_and_draws_it(shell, tmp_path):
    plot = tmp_path / "load.svg"
    options = ["--until-breaks", "--step", "0.2", "--p99", "0.000001", "--processes", "1", "--plot", str(plot)]
    found = shell.json("bench", *options)
    assert list(found) == [
        "engine",
        "processes",
        "p99_limit",
        "sustained",
        "broke_at",
        "broke_by",
        "limited_by",
        "steps",
    ]
    assert (found["engine"], found["processes"], found["sustained"]) == ("sqlite", 1, None)
    assert [step["rate"] for step in found["steps"]] == [50, 50, 12.5, 12.5, 3.125, 3.125]
    assert found["broke_at"] == 3.125
    assert found["broke_by"]
    assert found["limited_by"]
    assert ">broke at 3<" in plot.read_text()
    with Client(shell.environment["LEASEHOLD_URL"], namespace="leasehold-bench") as client:
        assert client.inspect() == []


def test_interrupted_bench_ends_its_processes_and_releases_everything(shell):
    bench = shell.start("bench", "--until-breaks", "--step", "20", "--processes", "2")
    with Client(shell.environment["LEASEHOLD_URL"], namespace="leasehold-bench") as client:
        poll_until(client.inspect, 60)
        bench.send_signal(signal.SIGINT)
        errors = bench.communicate(timeout=60)[1]
        assert (bench.returncode, errors) == (130, "")
        assert client.inspect() == []


def test_bench_refuses_options_that_do_not_go_together(shell):
    assert shell("bench", "--until-breaks", "--held", "3").returncode == 64
    assert shell("bench", "--plot", "load.svg").returncode == 64
    assert shell("bench", "--until-breaks", "--step", "61").returncode == 64


def test_processes_of_a_bench_take_no_module_from_the_working_directory(planted_modules, tmp_path):
    with client_processes(f"sqlite://{tmp_path}/x.db", "", "x/", 1):
        pass  # all are ready
    assert not planted_modules.exists()


def test_plot_that_is_a_link_is_refused_and_not_followed(shell, tmp_path):
    (tmp_path / "precious").write_text("keep me")
    (shell.folder / "load.svg").symlink_to(tmp_path / "precious")
    done = shell("bench", "--until-breaks", "--step", "0.2", "--processes", "1", "--plot", "load.svg")
    assert (done.returncode, "a symbolic link is not followed" in done.stderr) == (64, True)
    assert (tmp_path / "precious").read_text() == "keep me"
