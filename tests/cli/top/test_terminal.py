"""`leasehold top` in real terminals: a pseudo-terminal, and tmux with what it shows on its screen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import termios

import pytest

from leasehold.cli.top.screen import split_keys
from tests.support.program import PROGRAM

ENTERED, LEFT = "\x1b[?1049h", "\x1b[?7h\x1b[?25h\x1b[?1049l"


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOAq", ["up", "q"]),
        ("\x1b", ["escape"]),
        ("\x1bq", ["escape", "q"]),
        ("\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        ("\r\x7f/ä", ["enter", "backspace", "/", "ä"]),
        ("\x1b[200~\x00\x01x", ["x"]),
        ("\x1b[", []),
    ],
)
def test_keys_are_read_from_what_the_terminal_sends(sent, keys):
    assert split_keys(sent) == keys


@pytest.mark.parametrize("arguments", [["--once"], []])
def test_top_without_a_terminal_prints_one_table(shell, arguments):
    shell.hold("orders/42", "--holder", "web-3")
    done = shell("top", *arguments)
    head, line = done.stdout.splitlines()
    assert head.split() == ["NAME", "STATE", "HOLDER", "TOKEN", "HELD", "LEFT", "QUEUE", "OLDEST", "WAIT"]
    assert line.split()[:3] == ["orders/42", "held", "web-3"]
    assert shell("top", "other/").stderr == "leasehold: no holders or waiters of names that begin with other/\n"


def test_top_as_json_prints_what_ls_prints(shell):
    shell.hold("orders/42")
    (found,) = json.loads(shell("-o", "json", "top", "--once").stdout)
    (listed,) = shell.json("ls")
    assert found.keys() == listed.keys()
    assert (found["name"], found["token"]) == ("orders/42", listed["token"])


def test_top_on_an_engine_that_does_not_answer_exits_69(shell):
    done = shell("-u", "redis://127.0.0.1:1", "top", "--once")
    assert done.returncode == 69


@pytest.mark.parametrize("end", ["q", signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_terminal_is_restored_however_top_ends(shell, end):
    terminal = shell.terminal("top")
    before = termios.tcgetattr(terminal.fd)
    terminal.read("no holders or waiters")
    assert ENTERED in terminal.seen
    assert not termios.tcgetattr(terminal.fd)[3] & termios.ICANON
    if isinstance(end, str):
        terminal.type(end)
    else:
        os.kill(terminal.pid, end)
    assert terminal.wait() == (0 if end == "q" else 128 + end)
    assert terminal.seen.endswith(LEFT)
    assert termios.tcgetattr(terminal.fd)[3] & termios.ICANON == before[3] & termios.ICANON


class Tmux:
    """A tmux server of its own, and a shell in it."""

    def __init__(self, folder, environment: dict[str, str]) -> None:
        self._environment = {**environment, "LC_ALL": "C.UTF-8"}
        self._socket = str(folder / "tmux")
        self("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "20", "bash --norc")

    def __call__(self, *arguments: str) -> str:
        command = ["tmux", "-S", self._socket, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def type(self, *keys: str) -> None:
        self("send-keys", *keys)

    @property
    def screen(self) -> str:
        return self("capture-pane", "-p")

    def shows(self, variable: str) -> str:
        return self("display-message", "-p", f"#{{{variable}}}").strip()


@pytest.fixture
def tmux(shell, tmp_path):
    if shutil.which("tmux") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("tmux is not installed")
    tmux = Tmux(tmp_path, shell.environment)
    yield tmux
    tmux("kill-server")


@pytest.mark.extended
def test_screen_of_top_in_tmux(shell, tmux, wait_until):
    """Looked at: the list, a new size, a name that appears, detail, suspend and continue, the end."""
    shell.hold("orders/42", "--holder", "web-3", "--purpose", "settle")
    shell.start("run", "--holder", "web-4", "orders/42", "--", "true")
    tmux.type(f"{shlex.join(PROGRAM)} top", "Enter")
    wait_until(lambda: "waiting 1" in tmux.screen)
    first, _, _, line, *_ = tmux.screen.splitlines()
    assert first.startswith("leasehold top  sqlite")
    assert first.endswith("live")  # its last column, too
    assert line.split()[:4] == ["●", "HELD", "orders/42", "web-3"]
    assert (tmux.shows("alternate_on"), tmux.shows("cursor_flag")) == ("1", "0")
    tmux("resize-window", "-x", "60", "-y", "12")
    wait_until(lambda: tmux.screen.splitlines()[0].rstrip().endswith("live") and len(tmux.screen.splitlines()) == 12)
    assert max(map(len, tmux.screen.splitlines())) <= 60
    shell.hold("another")
    wait_until(lambda: "another" in tmux.screen)
    tmux.type("Enter")
    wait_until(lambda: "for: settle" in tmux.screen)
    tmux.type("C-z")
    wait_until(lambda: "Stopped" in tmux.screen)
    assert (tmux.shows("alternate_on"), tmux.shows("cursor_flag")) == ("0", "1")
    tmux.type("fg", "Enter")
    wait_until(lambda: "for: settle" in tmux.screen)
    tmux.type("q")
    wait_until(lambda: tmux.shows("alternate_on") == "0")
    tmux.type("stty -a", "Enter")
    wait_until(lambda: "echo " in tmux.screen)
    assert "-icanon" not in tmux.screen
    assert tmux.shows("cursor_flag") == "1"
