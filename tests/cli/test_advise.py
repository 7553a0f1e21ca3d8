"""`leasehold advise`: every answer names a tool and pages that exist; questions only in a terminal."""

from __future__ import annotations

import itertools
import json
import os
import pty
import subprocess
import sys

import pytest

from leasehold.cli.advise import DANGERS, ENGINES, HAVE, TOOLS, WHERE, choose_engine
from leasehold.cli.app import start
from leasehold.cli.docs import page_names


@pytest.mark.parametrize("danger", DANGERS)
def test_every_danger_has_advice_with_existing_pages(danger, capsys) -> None:
    assert start(["-o", "json", "advise", "--danger", danger, "--where", "machines", "--have", "redis"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["page"] in page_names()
    assert (advice["engine"] is not None) == (advice["ttl"] is not None) == TOOLS[danger].engine
    if advice["engine"]:
        assert advice["engine"]["url"] == "redis://host"


def test_every_engine_page_exists() -> None:
    found = {
        choose_engine(where, (have,), survive) for where, have, survive in itertools.product(WHERE, HAVE, (False, True))
    }
    assert {engine.page for engine in found} <= set(page_names())
    assert {engine.url for engine in ENGINES.values()} <= {engine.url for engine in found}


def test_locks_that_must_survive_a_machine_need_a_majority() -> None:
    assert choose_engine("machines", ("redis", "zookeeper"), True).url.startswith("zookeeper://")
    assert choose_engine("machines", ("redis",), True).url.startswith("etcd://")


def test_ttl_follows_the_longest_pause_and_answer(capsys) -> None:
    command = ["-o", "json", "advise", "--danger", "leader", "--where", "machine", "--pause", "10s", "--network", "5s"]
    assert start(command) == 0
    assert json.loads(capsys.readouterr().out)["ttl"] > 3 * 15


def test_question_without_a_terminal_is_a_usage_error(capsys, monkeypatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert start(["advise"]) == 64
    assert "pass --danger: row, message" in capsys.readouterr().err


def test_answers_in_a_terminal_lead_to_advice() -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "leasehold", "advise"],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        os.write(master, b"6\n3\n1\n")
        out, err = program.communicate(timeout=60)
    os.close(master)
    os.close(slave)
    assert program.returncode == 0, err
    assert out.startswith("Use       a lock and a fence\n")
    assert "Engine    postgresql://" in out
