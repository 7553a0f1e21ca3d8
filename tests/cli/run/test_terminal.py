"""On a terminal: Ctrl-C, Ctrl-Z, which process reads, and the terminal's state afterwards."""

import sys

PROGRAM = f"{sys.executable} -m leasehold"


def test_child_has_the_terminal(shell):
    script = "import os, sys; print('mine', os.tcgetpgrp(0) == os.getpgrp(), all(map(os.isatty, (0, 1, 2))))"
    terminal = shell.terminal("run", "j", "--", sys.executable, "-c", script)
    terminal.read("mine True True")
    assert terminal.wait() == 0


def test_terminal_input_reaches_child(shell):
    terminal = shell.terminal("run", "j", "--", "sh", "-c", "echo name?; read name; echo hello $name")
    terminal.read("name?")
    terminal.type("Ada\n")
    terminal.read("hello Ada")
    assert terminal.wait() == 0


def test_ctrl_c_reaches_child_and_its_exit_code_is_returned(shell):
    script = "trap 'echo caught; exit 9' INT; echo ready; read line"
    terminal = shell.terminal("run", "j", "--", "sh", "-c", script)
    terminal.read("ready")
    terminal.type("\x03")
    terminal.read("caught")
    assert terminal.wait() == 9


def test_ctrl_c_ends_child_without_handler(shell):
    script = "import signal; signal.signal(2, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    terminal = shell.terminal("run", "j", "--", sys.executable, "-c", script)
    terminal.read("ready")
    terminal.type("\x03")
    assert terminal.wait() == 130


def test_ctrl_c_while_queued_leaves_the_queue(shell, wait_until):
    shell.hold("j")
    terminal = shell.terminal("run", "j", "--", "touch", "ran")
    wait_until(lambda: shell.json("get", "j")["waiters"])
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert shell.json("get", "j")["waiters"] == []
    assert not (shell.folder / "ran").exists()


def test_queued_run_on_terminal_says_that_it_waits(shell):
    holder = shell.hold("j", "--holder", "web-3")
    terminal = shell.terminal("run", "j", "--", "echo", "my turn")
    terminal.read("j is held by web-3")
    terminal.read("; waiting")
    holder.stdin.close()
    terminal.read("my turn")
    assert terminal.wait() == 0


def start_bash(shell):
    """An interactive shell, which has job control."""
    bash = shell.terminal(program=["bash", "--norc", "--noprofile", "-i"])
    bash.type("PS1='''$ '; bind 'set enable-bracketed-paste off'; echo be''gin\n")
    bash.read("begin")
    return bash


def test_shell_gets_the_terminal_back_after_run(shell):
    bash = start_bash(shell)
    bash.type(f"{PROGRAM} run j -- true; read line; echo got=$line\n")
    bash.type("typed\n")
    bash.read("got=typed")
    bash.type("exit\n")
    assert bash.wait() == 0


def test_run_stopped_by_ctrl_z_continues_after_fg(shell):
    bash = start_bash(shell)
    bash.type(f"{PROGRAM} run j -- sh -c 'echo rea''dy; read line; echo got=$line; exit 3'\n")
    bash.read("ready")
    bash.type("\x1a")
    bash.read("Stopped")
    bash.type("echo prompt''-again\n")
    bash.read("prompt-again")
    bash.type("fg\n")
    bash.type("hello\n")
    bash.read("got=hello")
    bash.type("echo code=$?\n")
    bash.read("code=3")
    bash.type("exit\n")
    bash.wait()


def test_run_stopped_by_ctrl_z_past_the_ttl_loses_its_lease(shell):
    bash = start_bash(shell)
    bash.type(f"{PROGRAM} run --ttl 3 j -- sh -c 'echo rea''dy; read line; echo sur''vived'\n")
    bash.read("ready")
    bash.type("\x1a")
    bash.read("Stopped")
    bash.type("sleep 3.3; fg\n")
    bash.read("is lost")
    bash.type("echo code=$?\n")
    bash.read("code=79")
    assert "survived" not in bash.seen
    bash.type("exit\n")
    bash.wait()


def test_child_in_pipeline_gets_the_terminal_when_it_reads(shell):
    """`leasehold run j -- report | less`: the pager reads the keyboard, the report does not."""
    bash = start_bash(shell)
    bash.type(f"{PROGRAM} run j -- sh -c 'echo as''ked; read line; echo got=$line; sleep 0.2' | cat; echo aft''er\n")
    bash.read("asked")
    bash.type("hello\n")
    bash.read("got=hello")
    bash.read("after")
    bash.type("exit\n")
    assert bash.wait() == 0


def test_ctrl_c_in_pipeline_reaches_child(shell):
    bash = start_bash(shell)
    bash.type(
        f"{PROGRAM} run j -- sh -c "
        "'trap \"echo cau\"\"ght >&2; exit 9\" INT; echo rea''dy >&2; sleep 60 & wait' | cat\n"
    )
    bash.read("ready")
    bash.type("\x03")
    bash.read("caught")
    bash.type("exit\n")
    bash.wait()
