"""Clients in child processes: forked, interrupted, paused, exiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.support.paths import child_environment

FORK = """
import os, sys, threading, leasehold
from tests.support import probe
client = leasehold.Client("memory://shared", ttl=30)
lock = client.lock("a")
with lock as lease:
    client.lock("idle").acquire(wait=0).release()
    notified = []
    lease.on_lost(notified.append)
    pid = os.fork()
    if pid == 0:
        try:
            assert (lease.state, lease.lost_reason) == ("LOST", "forked"), lease
            assert not lease.release()
            try:
                lease.renew()
                sys.exit("renewed")
            except leasehold.LeaseLost:
                pass
            assert not probe.watchdog(client).running and not probe.registry(client).held and not notified
            assert client.inspect() == []
            with client.lock("b") as mine:          # the client itself can be used again
                assert mine.token > lease.token and mine.holder.endswith(str(os.getpid()))
            try:
                lock.__exit__(None, None, None)     # leaving the parent's with
                sys.exit("left silently")
            except leasehold.LeaseLost as lost:
                assert lost.reason == "forked"
        except BaseException as error:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lease.check()
    assert [h.name for h in client.inspect()] == ["a"]
assert lease.state == "RELEASED"
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_child_does_not_hold_renew_or_release() -> None:
    # From 3.12 on, Python warns of a fork in a process with threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, threading, time, leasehold
from tests.support import probe
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, and so inherited, where tests run in the background
holder, client = leasehold.Client("memory://x"), leasehold.Client("memory://x")
held = holder.lock("a").acquire()
def interrupt():
    while not probe.registry(client).waiting:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    client.lock("a").acquire()
    raise SystemExit("acquired")
except KeyboardInterrupt:
    pass
assert [h.state for h in holder.inspect()] == ["held"], holder.inspect()
assert not probe.registry(client).waiting and not probe.pending_releases(client)
held.release(); client.close(); holder.close()
"""


def test_ctrl_c_inside_acquire_leaves_the_queue() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


STOPPED = """
import sys, leasehold
client = leasehold.Client("memory://")
lease = client.lock("a", ttl=3).acquire()
print("holding", flush=True)
sys.stdin.readline()
try:
    lease.check()
    print("WROTE", flush=True)
except leasehold.LeaseLost as lost:
    print(lost.reason, flush=True)
sys.exit(0)
"""


def test_process_paused_beyond_ttl_raises_before_any_write() -> None:
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "holding\n"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # returns once the child is paused
    child.stdin.write("go on\n")  # lets the child write as soon as it continues
    child.stdin.flush()
    threading.Event().wait(3.3)  # longer than the ttl
    child.send_signal(signal.SIGCONT)
    assert child.stdout.readline() == "stalled\n"
    assert child.wait(20) == 0
    child.stdin.close()
    child.stdout.close()


def test_process_exits_cleanly_without_releasing_held_lease() -> None:
    program = "import leasehold; c = leasehold.Client('memory://'); l = c.lock('a').acquire(); print(l.state)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELD\n", "")
