"""`leasehold break`: it shows the holder, asks for confirmation, and breaks nothing else."""

from datetime import UTC, datetime

import pytest

from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.running_server import running


def token_of(shell, name="j"):
    return shell.json("get", name)["holders"][0]["token"]


def test_break_with_token_does_not_prompt(shell):
    shell.hold("j", "--holder", "web-3")
    token = token_of(shell)
    done = shell("break", "j", "--token", str(token))
    assert (done.returncode, done.stdout) == (0, "")
    assert f"broke j (token {token}, held by web-3)" in done.stderr
    assert shell.json("get", "j")["holders"] == []


def test_break_with_old_token_leaves_the_holder(shell):
    shell.hold("j")
    token = token_of(shell)
    done = shell("break", "j", "--token", str(token - 1))
    assert done.returncode == 0
    assert "nothing was broken" in done.stderr
    assert token_of(shell) == token


def test_break_without_token_and_terminal_is_refused_with_a_hint(shell):
    shell.hold("j", "--holder", "web-3")
    token = token_of(shell)
    done = shell("break", "j")
    assert done.returncode == 64
    assert "web-3" in done.stderr
    assert f"--token {token}" in done.stderr
    assert "--yes" in done.stderr
    assert token_of(shell) == token


def test_break_with_yes_breaks_the_current_holder(shell):
    shell.hold("j")
    done = shell("break", "--yes", "j")
    assert (done.returncode, "\x1b" in done.stderr) == (0, False)  # colours are for terminals
    assert shell.json("get", "j")["locked"] is False


@pytest.mark.parametrize(("answer", "code", "locked"), [("y", 0, False), ("n", 77, True), ("", 77, True)])
def test_break_on_terminal_prompts_before_it_breaks(shell, answer, code, locked):
    shell.hold("j", "--holder", "web-3")
    token = token_of(shell)
    screen = shell.terminal("break", "j")
    screen.read("web-3")
    screen.read(f"Break j (token {token})? [y/N]")
    screen.type(f"{answer}\n")
    assert screen.wait() == code
    assert shell.json("get", "j")["locked"] is locked


def test_break_of_several_holders_requires_a_token(shell):
    shell.hold("j", "-s")
    shell.hold("j", "-s")
    done = shell("break", "--yes", "j")
    assert done.returncode == 64
    tokens = [holding["token"] for holding in shell.json("get", "j")["holders"]]
    assert all(str(token) in done.stderr for token in tokens)
    assert shell("break", "j", "--token", str(tokens[0])).returncode == 0
    assert [holding["token"] for holding in shell.json("get", "j")["holders"]] == tokens[1:]


def test_break_of_free_name_succeeds(shell):
    done = shell("break", "j")
    assert done.returncode == 0
    assert "j is free" in done.stderr


def test_break_prints_json(shell):
    shell.hold("j")
    token = token_of(shell)
    found = shell.json("break", "j", "--token", str(token))
    assert list(found) == ["namespace", "name", "token", "broken", "holding"]
    assert (found["name"], found["token"], found["broken"]) == ("j", token, True)
    assert found["holding"]["token"] == token
    assert shell.json("break", "j") == {"namespace": "", "name": "j", "token": None, "broken": False, "holding": None}


def test_break_with_closed_stdin_is_refused(shell):
    shell.hold("j")
    done = shell.sh("break j <&-")
    assert done.returncode == 64
    assert "--yes" in done.stderr


def test_break_by_a_key_without_the_right_is_77(shell, tmp_path):
    """Also if root breaks: the lock server decides by the key."""
    now = datetime.now(UTC)
    for who, right in (("web", "read,lock:*:"), ("operator", "read,lock,break:*:")):
        (tmp_path / who).write_text(keys.create(tmp_path / "keys.toml", who, [Right.parse(right)], now=now))
        (tmp_path / who).chmod(0o600)
    with running("--keys", str(tmp_path / "keys.toml")) as server:
        web, operator = (f"http://127.0.0.1:{server.port}?api_key_file={tmp_path / who}" for who in ("web", "operator"))
        assert shell("-u", web, "acquire", "j", "--ttl", "300").returncode == 0
        token = str(shell.json("-u", web, "get", "j")["holders"][0]["token"])
        refused = shell("-u", web, "break", "j", "--token", token)
        assert refused.returncode == 77, refused.stderr
        assert "Traceback" not in refused.stderr
        assert str(shell.json("-u", web, "get", "j")["holders"][0]["token"]) == token
        assert shell("-u", operator, "break", "j", "--token", token).returncode == 0
