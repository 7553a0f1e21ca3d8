"""`leasehold resize`: sets and removes the limit of a semaphore in use."""

import json


def test_resize_counts_whatever_the_programs_ask_for(shell):
    shell.hold("j", "--slots", "3")
    shell.hold("j", "--slots", "3")
    done = shell("resize", "j", "1")
    assert (done.returncode, done.stdout) == (0, "")
    assert "j has 1 slot and 2 holders: it is granted again when no holder is left" in done.stderr
    assert shell("run", "-n", "--slots", "3", "j", "--", "true").returncode == 75
    assert shell.json("resize", "j", "3") == {"namespace": "", "name": "j", "limit": 3, "held": 2}
    assert shell("run", "-n", "--slots", "9", "j", "--", "true").returncode == 0
    assert {holding["limit"] for holding in shell.json("get", "j")["holders"]} == {3}


def test_resize_unset_lets_the_programs_decide_again(shell, tmp_path):
    audit = tmp_path / "audit.jsonl"
    shell("resize", "j", "1", "--reason", "a slow disk", "--audit", str(audit))
    assert shell("run", "j", "--", "true").returncode == 78
    assert shell("resize", "j", "--unset").returncode == 0
    assert shell("run", "j", "--", "true").returncode == 0
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    (resize,) = [record for record in records if record["action"] == "resize"]
    assert (resize["lock"]["limit"], resize["why"]) == (1, "a slow disk")


def test_resize_needs_a_limit_or_unset(shell):
    for arguments in (["j"], ["j", "0"], ["j", "2", "--unset"]):
        assert shell("resize", *arguments).returncode == 64


def test_resize_of_a_lock_in_use_is_refused(shell):
    shell.hold("j")
    done = shell("resize", "j", "2")
    assert done.returncode == 78
    assert "j is in use as a lock" in done.stderr
