"""Lock options: what cannot work is refused when the lock is built."""

from __future__ import annotations

import pytest

from leasehold import ConfigError, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def test_lock_with_unmet_requirement_is_refused_when_built(bench) -> None:
    client = bench.client()
    requirements = {"fencing", "fair", "push", "shared", "slots", "outlives", "break-notice", "engine-clock"}
    client.lock("a", require=requirements).acquire().release()
    for requirement in ("survives-restart", "survives-minority"):
        with pytest.raises(Unsupported, match=f"does not promise {requirement}") as refused:
            client.lock("a", require={requirement})
        assert refused.value.missing == (requirement,)
    with pytest.raises(ConfigError, match="not 'shiny'"):
        client.lock("a", require=["shiny"])
    with pytest.raises(ConfigError, match="a set of names"):
        client.lock("a", require="fencing")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": 0}, "ttl must be more than 0"),
        ({"ttl": float("nan")}, "finite"),
        ({"ttl": "soon"}, "seconds, or a text such as '30s'"),
        ({"ttl": True}, "a number of seconds"),
        ({"wait": -1}, "wait must be 0 or more"),
        ({"min_hold": -1}, "min_hold"),
        ({"max_hold": 0}, "max_hold must be more"),
        ({"min_hold": 5, "max_hold": 4}, "must not exceed max_hold"),
        ({"delay": float("inf")}, "delay must be a finite"),
        ({"holder": "x" * 201}, "holder must be printable"),
        ({"purpose": "a\nb"}, "purpose must be printable"),
    ],
)
def test_invalid_lock_options_are_refused_before_any_call(bench, options, says) -> None:
    with pytest.raises(ConfigError, match=says):
        bench.client().lock("a", **options)
    assert not bench.transport.calls


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_invalid_semaphore_limits_are_refused(bench, limit) -> None:
    with pytest.raises(ConfigError, match="limit must be a whole number"):
        bench.client().semaphore("s", limit)


def test_lock_rejects_timeout_and_unknown_options(bench) -> None:
    for build in (bench.client().lock, bench.client().rwlock("a").read):
        with pytest.raises(TypeError, match=r"use ttl= .* wait="):
            build(**({"name": "a"} if build.__name__ == "lock" else {}), timeout=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tll'"):
        bench.client().lock("a", tll=5)


def test_ttl_below_clock_drift_margin_is_refused(bench) -> None:
    with pytest.raises(ConfigError, match="must be greater than"):
        bench.client().lock("a", ttl=0.002)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("timeout", "use ttl="), ("blocking", "use wait=0 or try_acquire"), ("blocking_timeout", "use wait=")],
)
def test_acquire_names_our_option_for_that_of_another_library(bench, name, advice) -> None:
    with pytest.raises(TypeError, match=rf"acquire\(\) has no '{name}': {advice}"):
        bench.client().lock("a").acquire(**{name: 3, "other": 1})
