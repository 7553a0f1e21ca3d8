"""What `make busy` records of its runs, and what it says of the record."""

from __future__ import annotations

import re

import pytest

from tools import busy
from tools.busy import Run

TESTS = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("text", ["a - b [c]"])
def test_bad(text): assert text == "FAILED x::y"

def test_skipped(): pytest.skip("no server")

@pytest.fixture
def broken(): raise OSError

def test_without_its_fixture(broken): pass
"""


def run(date: str = "2026-11-01T10:00:00Z", *failures: str, code: int | None = None, passed: int = 90) -> Run:
    code = int(bool(failures)) if code is None else code
    return Run(date, "abc1234", 4, [], code, passed, len(failures), 2, 400.4, 0.5, 9.9, list(failures))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], "no runs"),
        (
            [run()],
            "1 run on 2026-11-01 beside 4 busy loops, 90 tests passed in each, in 400 s: none failed",
        ),
        (
            [
                run(),
                run("2026-11-03T10:00:00Z", "t.py::a", passed=89),
                run("2026-11-02T10:00:00Z", "t.py::a", "t.py::b"),
            ],
            "3 runs from 2026-11-01 to 2026-11-03 beside 4 busy loops, 89 to 90 tests passed in each, in 400 s: 2 runs "
            "failed; t.py::a 2; t.py::b 1",
        ),
        (
            [run(code=2, passed=0)],
            "1 run on 2026-11-01 beside 4 busy loops, 0 tests passed in each, in 400 s: 1 run failed; without the name "
            "of a test 1",
        ),
    ],
    ids=["none", "one", "failures", "crash"],
)
def test_summary_counts_runs_and_the_failures_of_each_test(runs, expected) -> None:
    assert busy.summary(runs) == expected


def test_record_has_a_line_for_each_run_with_the_failed_tests(tmp_path, monkeypatch, capsys) -> None:
    test_file, record = tmp_path / "test_x.py", tmp_path / "busy.jsonl"
    test_file.write_text(TESTS)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than the tests to run
    arguments = ["--loops=0", "--runs=2", f"--record={record}", "-p", "no:cacheprovider", str(test_file)]
    monkeypatch.setattr("sys.argv", ["busy", *arguments])
    assert busy.main() == 1
    assert "2 of 2 runs failed beside 0 busy loops" in capsys.readouterr().out
    first, second = busy.read_record(record)
    for each in (first, second):
        assert (each.code, each.passed, each.failed, each.skipped) == (1, 1, 2, 1)
        assert [name.partition("::")[2] for name in each.failures] == [
            "test_bad[a - b [c]]",
            "test_without_its_fixture",
        ]
        assert each.seconds > 0
        assert min(each.load_at_start, each.load_at_end) >= 0
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", each.commit) or not each.commit
    assert first.date <= second.date
    monkeypatch.setattr("sys.argv", ["busy", f"--summary={record}"])
    assert busy.main() == 0
    assert re.search(r"2 runs .* 2 runs failed; .*test_bad\[a - b \[c\]\] 2; ", capsys.readouterr().out)
