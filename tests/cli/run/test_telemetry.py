"""`leasehold run` observed: its metrics file, its traces, its log lines."""

import json
import os
import re
import signal

import pytest

from tests.support.metric_samples import samples
from tests.support.paths import child_environment

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


# ----------------------------------------------------------------- metrics


def test_metrics_of_runs_add_up_in_one_file(shell, tmp_path):
    file = tmp_path / "leasehold.prom"
    for code in (0, 3, 0):
        assert shell("run", "--metrics-file", str(file), "report-7", "-c", f"exit {code}").returncode == code
    assert shell("run", "orders/4", "--", "true", LEASEHOLD_METRICS_FILE=str(file)).returncode == 0
    found = samples(file)
    assert found["leasehold_acquires_total sqlite report-*  granted direct"] == 3
    assert found["leasehold_acquires_total sqlite orders/*  granted direct"] == 1
    assert found["leasehold_hold_seconds_count released sqlite report-* "] == 3
    assert found["leasehold_run_last_exit_code report-* "] == 0
    assert (
        found["leasehold_run_last_success_timestamp_seconds report-* "]
        >= found["leasehold_run_last_end_timestamp_seconds report-* "] - 1
    )
    assert not [name for name in found if name.startswith(("leasehold_held", "leasehold_build_info"))]
    assert os.stat(file).st_mode & 0o777 == 0o644
    left = {entry for entry in os.listdir(tmp_path) if "prom" in entry or entry.startswith(".lease")}
    assert left == {file.name, f".{file.name}.lock"}


def test_run_that_fails_keeps_the_time_of_the_last_success(shell, tmp_path):
    file = tmp_path / "leasehold.prom"
    shell("run", "--metrics-file", str(file), "job", "--", "true")
    success = samples(file)["leasehold_run_last_success_timestamp_seconds job "]
    shell("run", "--metrics-file", str(file), "job", "--", "false")
    found = samples(file)
    assert found["leasehold_run_last_success_timestamp_seconds job "] == success
    assert found["leasehold_run_last_end_timestamp_seconds job "] > success
    assert found["leasehold_run_last_exit_code job "] == 1


def test_busy_run_is_counted(shell, tmp_path):
    file = tmp_path / "leasehold.prom"
    shell.hold("job")
    assert shell("run", "-n", "--metrics-file", str(file), "job", "--", "true").returncode == 75
    found = samples(file)
    assert found["leasehold_acquires_total sqlite job  busy direct"] == 1
    assert found["leasehold_run_last_exit_code job "] == 75


def test_metrics_group_is_chosen_by_the_first_rule_that_matches(shell, tmp_path):
    file = tmp_path / "leasehold.prom"
    rules = ("--metrics-group", "invoice.*=bills", "--metrics-group", r"orders/\w+=checkout")
    shell("run", "--metrics-file", str(file), *rules, "orders/abc", "--", "true")
    assert "leasehold_acquires_total sqlite checkout  granted direct" in samples(file)
    shell("run", "--metrics-file", str(file), "--metrics-group", "all", "other", "--", "true")
    assert "leasehold_acquires_total sqlite all  granted direct" in samples(file)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--metrics-file", "x.txt"], "must end in .prom"),
        (["--metrics-file", "missing/x.prom"], "No such file or directory"),
        (["--metrics-group", "a("], None),
        (["--metrics-group", "a(=b"], "is not a regular expression"),
        (["--metrics-group", "a="], "is written REGEX=GROUP"),
    ],
)
def test_option_that_cannot_work_is_refused_before_the_run(shell, options, text):
    done = shell("run", *options, "job", "--", "echo", "ran")
    if text is None:  # a group may have any characters
        assert (done.returncode, done.stdout) == (0, "ran\n")
    else:
        assert (done.returncode, done.stdout) == (64, "")
        assert text in done.stderr


def test_file_that_cannot_be_written_does_not_change_the_run(shell, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    done = shell("run", "--metrics-file", f"{folder}/x.prom", "job", "-c", f"rm -r {folder}; exit 5")
    assert done.returncode == 5
    assert "the --metrics-file could not be written" in done.stderr


def test_link_in_place_of_the_metrics_file_is_not_followed(shell, tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "x.prom").symlink_to(tmp_path / "target")
    done = shell("run", "--metrics-file", str(tmp_path / "x.prom"), "job", "--", "true")
    assert done.returncode == 64
    assert "symbolic link" in done.stderr
    assert (tmp_path / "target").read_text() == "precious"


def test_elect_writes_the_metrics_file_while_it_leads(shell, tmp_path, wait_until):
    file = tmp_path / "x.prom"
    leader = shell.start("elect", "--metrics-file", str(file), "leader", "--", "sh", "-c", "echo led; exec cat")
    assert leader.stdout.readline() == "led\n"
    wait_until(file.exists)
    assert [value for name, value in samples(file).items() if name.startswith("leasehold_acquires_total")] == [1]
    leader.stdin.close()
    assert leader.wait(60) == 0


# ------------------------------------------------------------------ traces


def spans(output: str) -> dict[str, dict]:
    """The spans that the console exporter printed, by name."""
    decoder, found, rest = json.JSONDecoder(), {}, output[output.index("{") :]
    while rest.strip():
        span, end = decoder.raw_decode(rest)
        found[span["name"]], rest = span, rest[end:].lstrip()
    return found


def test_traces_of_run_continue_the_parent_and_reach_the_child(shell):
    done = shell("run", "--otel", "job", "-c", "echo $TRACEPARENT", TRACEPARENT=PARENT, OTEL_TRACES_EXPORTER="console")
    assert (done.returncode, done.stderr) == (0, "")
    child = done.stdout.splitlines()[0]
    found = spans(done.stdout)
    assert list(found) == ["leasehold.acquire", "leasehold.hold"]
    assert {span["parent_id"] for span in found.values()} == {"0x00f067aa0ba902b7"}
    assert {span["context"]["trace_id"] for span in found.values()} == {f"0x{TRACE}"}
    hold = found["leasehold.hold"]
    assert child.split("-")[1:3] == [TRACE, hold["context"]["span_id"].removeprefix("0x")]
    assert hold["attributes"]["leasehold.lock.name"] == "job"


def test_malformed_traceparent_begins_a_trace(shell):
    done = shell(
        "run", "job", "-c", "echo $TRACEPARENT", TRACEPARENT="junk", OTEL_TRACES_EXPORTER="console", LEASEHOLD_OTEL="1"
    )
    assert re.match(r"00-[0-9a-f]{32}-[0-9a-f]{16}-\d\d\n", done.stdout)
    assert {span["parent_id"] for span in spans(done.stdout).values()} == {None}


def test_trace_variables_pass_unchanged_without_otel(shell):
    variables = {"TRACEPARENT": "anything", "TRACESTATE": "a=b", "BAGGAGE": "c=d"}
    done = shell("run", "job", "-c", "echo $TRACEPARENT $TRACESTATE $BAGGAGE", **variables)
    assert done.stdout == "anything a=b c=d\n"


def test_otel_without_its_exporter_is_refused_before_the_run(shell):
    done = shell("run", "--otel", "job", "--", "echo", "ran", OTEL_TRACES_EXPORTER="no-such")
    assert (done.returncode, done.stdout) == (78, "")
    assert "there is no exporter 'no-such'" in done.stderr


def test_elect_with_traces_gives_each_term_a_trace(shell):
    done = shell(
        "elect",
        "--otel",
        "leader",
        "--",
        "sh",
        "-c",
        "echo $TRACEPARENT",
        OTEL_TRACES_EXPORTER="console",
    )
    assert done.returncode == 0
    assert list(spans(done.stdout)) == ["leasehold.acquire", "leasehold.hold"]


# -------------------------------------------------------------------- logs


def test_messages_are_json_with_the_log_format(shell):
    done = shell("--log-format", "json", "run", "job", "--", "no-such-program")
    line = json.loads(done.stderr)
    assert line["logger"] == "leasehold.cli"
    assert line["message"].startswith("cannot run no-such-program")
    done = shell("-vv", "run", "job", "--", "true", LEASEHOLD_LOG_FORMAT="json")
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in found if "event" in line] == ["attempted", "granted", "released"]


@pytest.mark.parametrize(("option", "prints"), [((), True), (("-q",), False), (("-v",), True)])
def test_run_that_waits_says_for_whom_unless_quiet(shell, option, prints, tmp_path):
    """After 10 seconds; here after a moment."""
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.support import probe_acquire\nsetattr(*probe_acquire.FIRST_REPORT_AFTER, 0.2)\n"
    )
    path = f"{tmp_path}{os.pathsep}{child_environment()['PYTHONPATH']}"
    holder = shell.hold("job", "--holder", "web-3")
    shell.environment["PYTHONPATH"] = path
    waiter = shell.start(*option, "run", "job", "-w", "2", "--", "true")
    _, stderr = waiter.communicate(timeout=60)
    expected = re.compile(r".*; waiting for \d+ s, at position 0 in the queue \(next\)")
    waiting = [line for line in stderr.splitlines() if expected.fullmatch(line)]
    assert bool(waiting) == prints
    if prints:
        assert waiting[0].startswith("leasehold: job is held by web-3 (")
    holder.send_signal(signal.SIGTERM)
