"""Health probes of all engines: every engine has one, and no answer of a server breaks it."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from typing import Any

import pytest

from harness.servers.hostile import ENGINES, HostileProxy, answers_of
from leasehold import ConfigError, engines
from leasehold.core.texts import MAX_SERVER_TEXT
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.health import RUNTIMES, probe
from tests.support.timing import check_elapsed

SECONDS = 0.4
MAX_TEXT = 8 * MAX_SERVER_TEXT  # Leasehold's own words, and the texts of five servers


@pytest.mark.parametrize("scheme", sorted(set(engines.BUILT_IN) - {"memory"}))
def test_every_engine_has_a_probe(scheme):
    assert importlib.util.find_spec(f"{engines.BUILT_IN[scheme]}.health")


def test_probe_of_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigError, match="no engine for nothing://"):
        probe("nothing://host")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_hostile_answers_never_break_a_probe(engine, runtime):
    with ExitStack() as exit_stack:
        rig = rig_or_skip(rig_type(engine))
        exit_stack.callback(rig.close)
        machine: Any = rig.client_path()
        exit_stack.callback(machine.close)
        proxies, url = [], machine.url
        for proxy in machine.proxies:
            proxies.append(HostileProxy(proxy.port))
            exit_stack.callback(proxies[-1].close)
            url = url.replace(f":{proxy.port}", f":{proxies[-1].port}")
        assert probe(url, runtime=runtime).up
        for answer in answers_of(engine):
            for each in proxies:
                each.attack(answer, at_once=engine == "mysql")
            began = time.monotonic()
            health = probe(url, SECONDS, runtime)
            check_elapsed(began, SECONDS + 0.5, answer.name)
            assert not health.up, answer.name
            texts = [health.error, *health.alarms]
            for member in health.members:
                texts += [member.error, member.version, *member.notes, *(each.value for each in member.findings)]
            for text in filter(None, texts):
                assert text.isprintable(), (answer.name, text)
                assert len(text) <= MAX_TEXT, (answer.name, text)
            for each in proxies:
                each.relent()
        assert probe(url, runtime=runtime).up
