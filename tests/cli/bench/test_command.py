"""`bench`: a table, or one JSON object; nothing stays in the engine."""


def test_bench_prints_json(shell):
    found = shell.json("bench", "--rounds", "2", "--held", "3")
    assert list(found) == ["engine", "rounds", "held", "results"]
    assert (found["engine"], found["rounds"], found["held"]) == ("sqlite", 2, 3)
    assert all(list(result) == ["case", "micros", "ratio", "low", "high"] for result in found["results"])
    assert found["results"][0]["ratio"] == 1.0
    assert len(found["results"]) == 5


def test_bench_prints_table_for_engine_given_as_argument(shell):
    done = shell("bench", "memory://", "--rounds", "2", "--held", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memory: compared with one round trip\n")


def test_bench_of_unreachable_engine_fails_without_output(shell, tmp_path):
    (tmp_path / "file").write_text("")
    done = shell("bench", f"sqlite:///{tmp_path}/file/locks.db")
    assert done.returncode in (69, 78), done.stderr
    assert done.stdout == ""
