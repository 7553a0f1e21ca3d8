"""Credentials of the URL and the lease of `acquire` are not in output, `ps` or the environment of CMD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.servers.redis import RedisServer
from leasehold.cli.console import Console, say
from leasehold.cli.demo.runner import DemoRunner
from leasehold.cli.run.job import engine_environment
from leasehold.testing.conformance.rig import Absent

SECRET = "s3cr3tMARK"
# What CMD sees: its own environment, and the command line of every process.
LOOK = "cat /proc/self/environ; for p in /proc/[0-9]*; do cat $p/cmdline; done 2>/dev/null | grep -av 'LOOK=' || true"

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")


@pytest.fixture
def secret_url():
    try:
        server = RedisServer(password=SECRET).start()
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))
    yield f"redis://:{SECRET}@127.0.0.1:{server.port}"
    server.stop()


@needs_proc
def test_command_gets_no_password_no_lease_and_no_api_key(shell, secret_url):
    lease = shell("acquire", "other", LEASEHOLD_URL=secret_url)
    secret_id = json.loads(lease.stdout)["id"]
    secrets = {"LEASEHOLD_LEASE": lease.stdout, "LEASEHOLD_API_KEY": f"lh_web_{SECRET}"}
    done = shell("run", "j", "--", "sh", "-c", LOOK, LEASEHOLD_URL=secret_url, **secrets)
    assert done.returncode == 0, done.stderr
    assert "LEASEHOLD_TOKEN=" in done.stdout
    for text in (done.stdout, done.stderr):
        assert SECRET not in text
        assert secret_id not in text


@pytest.mark.parametrize("option", ["password", "sslpassword", "sentinel_password", "sslp%61ssword", "%70assword"])
def test_command_gets_no_url_with_an_option_for_a_password(option):
    """Also if the name of the option is percent-encoded, which a URL may have."""
    console = Console(url=f"postgresql://127.0.0.1/d?{option}={SECRET}")
    assert SECRET not in str(engine_environment(console))


def test_command_gets_a_url_without_a_password(shell, url):
    done = shell("run", "j", "--", "sh", "-c", "echo $LEASEHOLD_URL")
    assert done.stdout == f"{url}\n"


def test_url_is_not_in_the_command_lines_of_a_demo(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: started.append(argv))
    monkeypatch.setattr(DemoRunner, "__exit__", lambda self, *_: self._folder.cleanup())
    with DemoRunner("zombie", f"redis://:{SECRET}@127.0.0.1:1", print, size=None, verbose=False) as runner:
        runner.start("holder", "A")
    assert len(started) == 1
    assert SECRET not in str(started)


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [
        ("OUTPUT", ["ls"]),
        ("METRICS_FILE", ["-vv", "run", "j", "true"]),
        ("METRICS_FILE", ["--log-format", "json", "run", "j", "true"]),
        ("OTEL", ["run", "j", "true"]),
        ("SERVE_KEYS", ["serve", "key", "list"]),
        ("SERVE_LISTEN", ["serve"]),
        ("AUDIT", ["-vv", "audit", "verify"]),  # its traceback has the text of the error
    ],
)
@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@127.0.0.1:1/0",
        f"redis://127.0.0.1/0?password={SECRET}",
        f"redis://u:{SECRET} x {SECRET}@127.0.0.1:1/0",
    ],
)
def test_url_in_the_wrong_variable_is_not_shown(shell, variable, arguments, url):
    done = shell(*arguments, **{f"LEASEHOLD_{variable}": url})
    assert done.returncode in (64, 78)
    assert "redis:/" in done.stderr
    assert SECRET not in done.stderr + done.stdout


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_line_shows_no_url_with_a_password(log_format):
    program = (
        "import logging, sys; from leasehold.cli.console import Console\n"
        "Console(log_format=sys.argv[1]).prepare_logs()\n"
        "logging.getLogger('leasehold.hooks').warning('cannot write %s', sys.argv[2])"
    )
    argv = [sys.executable, "-c", program, log_format, f"redis://u:{SECRET}@127.0.0.1:1/x.prom"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "cannot write redis://***" in done.stderr
    assert SECRET not in done.stderr


def test_long_url_in_the_wrong_variable_is_not_shown_in_part(shell):
    done = shell("ls", LEASEHOLD_OUTPUT=f"redis://u:{SECRET * 100}@127.0.0.1:1/0")
    assert done.returncode == 64
    assert SECRET not in done.stderr


@pytest.mark.parametrize(
    "text", ["redis://h:6379 did not answer; pid 7 of a@b", "https://shop/a?b=c is held by me@h:1"]
)
def test_messages_without_a_password_are_shown_whole(capsys, text):
    say(text)
    assert capsys.readouterr().err == f"leasehold: {text}\n"


@pytest.mark.parametrize("arguments", [["-vv", "run", "j", "true"]])
@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}?{SECRET}=1@127.0.0.1:1",
        f"redis://user:12/{SECRET}@127.0.0.1:1",
        f"etcd://user:12/{SECRET}@127.0.0.1:1",
        f"postgresql://user:12#{SECRET}@127.0.0.1:1",
        f"mysql://user:{SECRET}@127.0.0.1:1/x",
        f"{SECRET}",
        f"sqlite://?{SECRET}=1",
    ],
)
def test_url_that_fails_is_not_shown(shell, tmp_path, arguments, url):
    result = ["--result-file", str(tmp_path / "r.json")] if "run" in arguments else []
    if result:
        arguments = [*arguments[:-2], *result, *arguments[-2:]]
    done = shell(*arguments, LEASEHOLD_URL=url)
    assert done.returncode in (69, 78), done.stderr
    shown = done.stdout + done.stderr + (Path(result[1]).read_text() if result else "")
    assert SECRET not in shown
