"""Durations as numbers, texts and `timedelta`, wherever the API takes seconds; and what is refused."""

from __future__ import annotations

import pickle
from datetime import timedelta
from math import inf, nan

import click
import pytest

from leasehold import Client, ConfigError, Conflict, advise_ttl, fences, optimistic
from leasehold.cli.options import seconds
from leasehold.config import EngineConfig, check_seconds, parse_duration
from leasehold.engines.zookeeper.url import parse_url
from tests.support import probe

_VALID = {
    "30s": 30.0,
    "10m": 600.0,
    "1h30m": 5400.0,
    "1d2h3m4s5ms": 93784.005,
    "0.5s": 0.5,
    "250ms": 0.25,
    "30": 30.0,
    "0.5": 0.5,
    "0s": 0.0,
}
_INVALID = ["", " ", "s", "30 s", "30S", "1.5h", "30m1h", "30s30s", "10 minutes", "-30s", "1h-5m", "\u0663s"]
_REFUSED = [True, False, None, nan, inf, -inf, -1, -0.5, 10**400, 1e15, b"30s", [30], "nan", "inf", "-1", timedelta(-1)]


@pytest.mark.parametrize("text", _VALID)
def test_duration_text_is_parsed(text) -> None:
    assert parse_duration(text) == pytest.approx(_VALID[text])
    assert seconds(text) == pytest.approx(_VALID[text])


@pytest.mark.parametrize("value", [*_INVALID, *_REFUSED])
def test_duration_that_makes_no_sense_is_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"^wait must be .*, not ") as caught:
        check_seconds("wait", value)
    assert len(str(caught.value)) < 160
    if isinstance(value, str):
        assert repr(value) in str(caught.value), "a text is shown in quotes"
        with pytest.raises(click.BadParameter):
            seconds(value)


def test_zero_is_refused_where_it_makes_no_sense() -> None:
    for zero in (0, 0.0, -0.0, "0s", timedelta(0)):
        assert check_seconds("wait", zero) == 0
        with pytest.raises(ConfigError, match="more than 0 seconds"):
            check_seconds("ttl", zero, allow_zero=False)


def test_clients_and_locks_take_durations(bench) -> None:
    client = bench.client(ttl="2m", call_timeout=timedelta(seconds=2))
    assert (probe.client_options(client).ttl, probe.client_options(client).call_timeout) == (120.0, 2.0)
    lock = client.lock("a", ttl="1h", wait="10m", min_hold="1s", max_hold=timedelta(days=2), delay="500ms")
    options = lock.options
    assert (options.ttl, options.wait, options.min_hold, options.max_hold, options.delay) == (3600, 600, 1, 172800, 0.5)
    lease = lock.acquire(wait="5s")
    lease.renew("2h")
    assert lease.ttl == 7200
    assert not lease.wait_lost("0s")
    assert client.lock("a").try_acquire() is None
    assert lease.release()
    with client.multilock(["b", "c"], wait="1m") as leases:
        assert leases.held
    election = client.election("d", max_hold="1h", min_hold="2s")
    assert probe.lock_of(election).options.min_hold == 2
    assert list(election.observe(seconds="0s")) == []


def test_once_and_schedules_take_durations() -> None:
    with Client("memory://") as client:
        assert client.once("k", lambda: 1, keep="1h", wait="1s", ttl="30s") == 1
        assert client.once_per("k", keep=timedelta(hours=1))(lambda: 2)() == 1
        client.schedule("job", "1h", offset="5m", late=timedelta(minutes=1))
        with pytest.raises(ConfigError, match="keep"):
            client.once("k", lambda: 1, keep="soon")


def test_optimistic_and_advise_ttl_take_durations() -> None:
    answers = [Conflict("row"), Conflict("row"), "done"]

    def work() -> object:
        if isinstance(answer := answers.pop(0), Conflict):
            raise answer
        return answer

    assert optimistic(work, pause="1ms", most_pause=timedelta(milliseconds=2)) == "done"
    assert advise_ttl("9s", timedelta(seconds=1), 1, drift=0.5) == 20


def test_fences_take_durations(tmp_path) -> None:
    fences.File(tmp_path / "a", wait="1m").write(5, "text")
    makers = (
        lambda seconds: fences.File(tmp_path / "a", wait=seconds),
        lambda seconds: fences.HTTPFence("http://127.0.0.1:1/", timeout=seconds),
        lambda seconds: fences.HTTPObjects("http://127.0.0.1:1/", timeout=seconds),
        lambda seconds: fences.EtcdFence("http://127.0.0.1:1", "k", timeout=seconds),
        lambda seconds: fences.EtcdLockFence("http://127.0.0.1:1", "k", lock="a", timeout=seconds),
        lambda seconds: fences.WSGIFence(print, wait=seconds),
    )
    for make in makers:
        make(timedelta(seconds=2))
        with pytest.raises(ConfigError, match="must be seconds, or a text such as"):
            make("2 seconds")


def test_url_option_takes_a_duration() -> None:
    assert parse_url(EngineConfig.parse("zookeeper://h:1/?session=1m", 5.0)).session_timeout == 60


@pytest.mark.parametrize("ttl", [1e12, 86_401, "25h", timedelta(days=1, seconds=1)])
def test_ttl_of_more_than_a_day_is_refused_without_max_ttl(bench, ttl) -> None:
    client = bench.client()
    with pytest.raises(ConfigError, match="max_ttl"):
        bench.client(ttl=ttl)
    with pytest.raises(ConfigError, match="at most 86400 s"):
        client.lock("a", ttl=ttl)
    lease = client.lock("a", ttl="24h").acquire()
    with pytest.raises(ConfigError, match="max_ttl"):
        lease.renew(ttl)
    lease.release()


def test_max_ttl_allows_a_longer_ttl_and_survives_pickling() -> None:
    with Client("memory://", ttl="36h", max_ttl="7d") as client:
        assert client.lock("a").options.ttl == 36 * 3600
        assert client.lock("a", ttl="7d").options.ttl == 7 * 86400
        with pytest.raises(ConfigError, match="at most 604800 s"):
            client.lock("a", ttl="8d")
        with pickle.loads(pickle.dumps(client)) as copy:
            assert probe.client_options(copy).max_ttl == 7 * 86400
    with Client("memory://", ttl=10, max_ttl=20) as strict, pytest.raises(ConfigError, match="at most 20 s"):
        strict.lock("a", ttl=21)
