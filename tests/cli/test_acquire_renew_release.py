"""`acquire`, `renew` and `release`: a lease that outlives its process, for callers that have its secret."""

import json
import os

import pytest

KEYS = [
    *("format", "engine", "namespace", "name", "id", "token", "slot", "ttl", "mode", "kind", "limit", "delay"),
    *("min_hold", "max_hold", "strict", "holder", "fingerprint", "ticket", "left"),
]


def acquire_lease(shell, *arguments):
    done = shell("acquire", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_acquired_lease_outlives_its_process(shell):
    text = acquire_lease(shell, "j", "--ttl", "60", "--holder", "deploy")
    lease = json.loads(text)
    assert list(lease) == KEYS
    assert (lease["name"], lease["ttl"], lease["holder"]) == ("j", 60, "deploy")
    assert 55 < lease["left"] < 60
    (seen,) = shell.json("get", "j")["holders"]
    assert (seen["token"], seen["fingerprint"], seen["holder"]) == (lease["token"], lease["fingerprint"], "deploy")
    assert lease["id"] not in shell("-o", "json", "ls").stdout
    assert shell("run", "-n", "j", "true").returncode == 75


def test_acquire_on_zookeeper_is_refused_with_a_hint(shell):
    done = shell("-u", "zk://127.0.0.1:1", "acquire", "j")
    assert (done.returncode, done.stdout) == (78, "")
    assert "ends a lease with the process that acquired it" in done.stderr
    assert "use `leasehold run`" in done.stderr


def test_lease_is_released_by_another_process(shell):
    text = acquire_lease(shell, "j")
    done = shell("release", LEASEHOLD_LEASE=text)
    assert (done.returncode, done.stdout) == (0, "")
    assert "released j" in done.stderr
    assert shell.json("get", "j")["locked"] is False


def test_renew_and_release_read_lease_from_stdin(shell):
    text = acquire_lease(shell, "j")
    assert shell("renew", stdin=text).returncode == 0
    assert shell("release", stdin=text).returncode == 0


def test_lease_is_renewed_by_another_process(shell):
    text = acquire_lease(shell, "j", "--ttl", "10")
    done = shell("-o", "json", "renew", "--ttl", "600", stdin=text)
    found = json.loads(done.stdout)
    assert list(found) == ["namespace", "name", "token", "left"]
    assert found["token"] == json.loads(text)["token"]
    assert 580 < found["left"] < 600
    assert shell.json("get", "j")["holders"][0]["left"] > 580


@pytest.mark.parametrize("command", [["acquire", "j"], ["renew"], ["run", "j", "true"], ["elect", "j", "true"]])
def test_ttl_of_more_than_a_day_is_refused_with_what_to_do(shell, command):
    """The message advised an argument that only the library has."""
    done = shell(command[0], "--ttl", "25h", *command[1:], stdin=acquire_lease(shell, "other"))
    assert done.returncode == 64
    assert "--ttl must be at most 86400 s, not 90000" in done.stderr
    assert "max_ttl" not in done.stderr
    assert "`leasehold renew`" in done.stderr


def test_renew_and_release_of_ended_lease_are_79(shell):
    text = acquire_lease(shell, "j")
    assert shell("release", stdin=text).returncode == 0
    renewed, released = shell("renew", stdin=text), shell("-o", "json", "release", stdin=text)
    assert renewed.returncode == released.returncode == 79
    assert "is lost" in renewed.stderr
    assert "had already ended" in released.stderr
    assert json.loads(released.stdout)["released"] is False


def test_late_release_does_not_free_the_next_holder(shell):
    first = acquire_lease(shell, "j")
    token = json.loads(first)["token"]
    shell("break", "j", "--token", str(token))
    second = json.loads(acquire_lease(shell, "j"))
    assert shell("release", stdin=first).returncode == 79
    assert shell("renew", stdin=first).returncode == 79
    assert shell.json("get", "j")["holders"][0]["token"] == second["token"] > token


def test_lease_expires_when_not_renewed(shell):
    text = acquire_lease(shell, "j", "--ttl", "0.3")
    assert shell("run", "-w", "30", "j", "true").returncode == 0
    assert shell("renew", stdin=text).returncode == 79


def test_acquire_into_closed_pipe_releases_the_lease(shell):
    reader, writer = os.pipe()
    os.close(reader)
    process = shell.start("acquire", "j", stdout=writer)
    os.close(writer)
    assert process.wait(60) == 141
    assert shell.json("get", "j")["locked"] is False


def test_printed_lease_keeps_slot_shared_mode_and_min_hold(shell):
    slot = acquire_lease(shell, "s", "--slots", "2")
    assert json.loads(slot)["slot"] == 0
    assert shell("renew", stdin=slot).returncode == 0
    reader = acquire_lease(shell, "r", "-s")
    assert shell("release", stdin=reader).returncode == 0
    cooling = acquire_lease(shell, "m", "--min-hold", "60")
    assert shell("release", stdin=cooling).returncode == 0
    assert shell.json("get", "m")["holders"][0]["state"] == "cooling"


def test_acquire_of_busy_name_is_75(shell):
    shell.hold("j")
    done = shell("acquire", "-n", "j")
    assert (done.returncode, done.stdout) == (75, "")
    assert "j is held by" in done.stderr
    assert shell("acquire", "-w", "0.1", "-E", "9", "j").returncode == 9


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("", 64, "no lease"),
        ("not json", 78, "not the JSON"),
        ("[]", 78, "one JSON object"),
        ('{"format": "lh1", "engine": "sqlite", "namespace": "", "name": "j", "id": 7}', 78, "'id'"),
        ('{"format": "lh1", "engine": "sqlite", "namespace": "", "name": "j", "id": "secret-id"}', 78, "'token'"),
    ],
)
@pytest.mark.parametrize("command", ["renew", "release"])
def test_invalid_lease_text_is_refused_without_being_shown(shell, command, text, code, why):
    done = shell(command, stdin=text)
    assert done.returncode == code
    assert why in done.stderr
    assert "secret-id" not in done.stderr


@pytest.mark.parametrize("command", ["renew", "release"])
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-u", "redis://127.0.0.1:1"), "the lease of j is on sqlite, and this client uses redis"),
        (("--namespace", "other"), "j is held in the namespace 'shop', and this client uses 'other'"),
    ],
)
def test_lease_of_another_engine_or_namespace_is_refused(shell, command, arguments, why):
    """It was reported as ended, although it was still held."""
    text = acquire_lease(shell, "--namespace", "shop", "j")
    done = shell(*arguments, command, stdin=text)
    assert done.returncode == 78
    assert why in done.stderr
    assert json.loads(text)["id"] not in done.stderr
    assert shell(command, stdin=text).returncode == 0, "without --namespace, that of the lease is used"


def test_release_on_terminal_names_the_lease_variable(shell):
    screen = shell.terminal("release")
    screen.read("$LEASEHOLD_LEASE")
    assert screen.wait() == 64


def test_lease_as_command_line_argument_is_refused(shell):
    text = acquire_lease(shell, "j")
    for command in ("renew", "release"):
        assert shell(command, text).returncode == 64
    assert shell.json("get", "j")["locked"] is True


@pytest.mark.parametrize("command", ["renew", "release"])
def test_renew_and_release_with_closed_stdin_are_64(shell, command):
    done = shell.sh(f"{command} <&-")
    assert done.returncode == 64
    assert "no lease" in done.stderr


def test_acquire_with_closed_stdout_leaves_no_lease(shell):
    assert shell.sh("acquire j >&-").returncode == 64
    assert shell.json("ls") == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name":' * 100_000], ids=["array", "object"])
def test_release_of_deeply_nested_json_is_78(shell, text):
    assert shell("release", stdin=text).returncode == 78
