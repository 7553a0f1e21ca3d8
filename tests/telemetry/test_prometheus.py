"""The metrics of a scripted run, to the letter; and what no run may do to them."""

from __future__ import annotations

import os
import random
import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import leasehold
from leasehold import Client, ConfigError, Event, StaleToken, Unavailable, fences, telemetry
from leasehold.engines.memory import MemoryEngine, MemoryServer
from leasehold.telemetry import Metrics, Prometheus, fan, metrics_text
from leasehold.telemetry import metrics as metrics_module
from leasehold.testing.clock import Clock, ClockThreads
from tests.support.client_fixtures import BreakableTransport
from tests.support.paths import ROOT

GOLDEN = Path(__file__).with_name("metrics.txt")  # written anew if UPDATE_GOLDEN is set


@pytest.fixture
def hook():
    return Prometheus(CollectorRegistry())


@pytest.fixture
def metrics_of():
    """The sum of samples: `metrics_of(hook)("leasehold_held", group="a")`; 0 if there is none."""

    def reader(hook):
        def value(name: str, **labels: str) -> float:
            samples = [sample for family in hook.families() for sample in family.samples]
            return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

        return value

    return reader


@pytest.fixture
def metrics(hook, metrics_of):
    return metrics_of(hook)


def event(kind: str, **fields: object) -> Event:
    return Event(**{"kind": kind, "engine": "redis", "namespace": "shop", "name": "orders/42", "at": 1.0, **fields})


# ------------------------------------------------------------------- a scripted run


def scripted_run(clock: Clock, hook: Prometheus) -> None:
    transport = BreakableTransport(MemoryServer(ClockThreads(clock)))

    def client(holder: str) -> Client:
        def opener(_config, runtime, registry):
            return MemoryEngine(runtime, registry, transport)

        return Client(
            "memory://",
            namespace="shop",
            holder=holder,
            on_event=hook,
            engine=opener,
            runtime=ClockThreads(clock),
        )

    with client("web-1") as first, client("web-2") as second:
        with first.lock("orders/42", ttl=30):  # renewed, and then released
            assert second.lock("orders/43").acquire().release()
            assert second.lock("orders/42").try_acquire() is None
            with clock.skipping(), pytest.raises(leasehold.NotAcquired):
                second.lock("orders/42").acquire(wait=2)
            clock.advance(12)
        held = first.lock("orders/44", ttl=30, max_hold=5).acquire()  # lost, and granted to a waiter
        with clock.skipping():
            waiter = second.lock("orders/44", wait=60).acquire()
        assert held.lost_reason == "max_hold"
        transport.silent = True
        with pytest.raises(Unavailable):
            first.lock("orders/45").acquire()
        clock.advance(11)  # at risk
        waiter.release()  # pending
        transport.silent = False
        clock.advance(60)
        report = first.lock("report").acquire()
        second.break_lock("report", token=report.token)
        clock.wait_idle()
        with pytest.raises(leasehold.Mismatch), first.lock("mixed"):
            second.semaphore("mixed", 2).try_acquire()
        for _ in range(2):
            first.once("rollup", lambda: 7)
        value = fences.Local("stock/7", 0)
        value.claim(2**53 - 1)
        fences.on_event(hook)
        for token in (4, report):
            with pytest.raises(StaleToken):
                value.write(token, 1)
        fences.on_event(None)
        hook(event("conflict", engine="", namespace="", name="stock"))
        still_held = first.lock("nightly-report").acquire()
        clock.advance(7)
        text = generate_latest(SimpleNamespace(collect=hook.collect)).decode()
        assert metrics_text(hook) == text  # without prometheus-client
        still_held.release()
    return text


def test_metrics_of_a_scripted_run_are_these_to_the_letter(hook, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(time=clock.wall))
    monkeypatch.setattr(metrics_module, "__version__", "VERSION")
    monkeypatch.setattr(metrics_module.platform, "python_version", lambda: "PYTHON")
    text = scripted_run(clock, hook)
    # Differences of large floats have noise in their last digits.
    text = re.sub(r" (\d+\.\d{6,}(?:e-\d+)?)$", lambda found: f" {round(float(found[1]), 3)}", text, flags=re.MULTILINE)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert list(text_string_to_metric_families(text))


LABELS = {"engine", "namespace", "group"}


def test_families_have_the_documented_types_and_labels():
    families = {family.name: family for family in text_string_to_metric_families(GOLDEN.read_text())}
    found = {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - LABELS - {"le"})
        for name, family in families.items()
    }
    assert found == {
        "leasehold_acquires": ("counter", {"outcome", "path"}),
        "leasehold_acquire_seconds": ("histogram", {"path"}),
        "leasehold_acquiring": ("gauge", set()),
        "leasehold_held": ("gauge", set()),
        "leasehold_hold_seconds": ("histogram", {"end"}),
        "leasehold_token_age_seconds": ("gauge", set()),
        "leasehold_renewals": ("counter", {"outcome"}),
        "leasehold_renew_seconds": ("histogram", set()),
        "leasehold_renew_margin_ratio": ("histogram", set()),
        "leasehold_at_risk": ("gauge", set()),
        "leasehold_leases_lost": ("counter", {"reason"}),
        "leasehold_releases_owed": ("counter", set()),
        "leasehold_stale_tokens": ("counter", {"fence"}),
        "leasehold_breaks": ("counter", set()),
        "leasehold_once": ("counter", {"outcome"}),
        "leasehold_conflicts": ("counter", set()),
        "leasehold_build_info": ("gauge", {"version", "python"}),
        "leasehold_hook_errors": ("counter", set()),
        "leasehold_events_dropped": ("counter", set()),
        "leasehold_groups_overflowed": ("counter", set()),
    }
    assert all(family.documentation for family in families.values())
    assert {label for sample in families["leasehold_breaks"].samples for label in sample.labels} == LABELS - {"group"}


def test_page_explains_every_metric():
    page = (ROOT / "docs/operations/metrics.md").read_text()
    families = list(text_string_to_metric_families(GOLDEN.read_text()))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    of_clients, _, _ = page.partition("\n## The lock server\n")  # those: tests/telemetry/test_alerts.py
    explained = set(re.findall(r"^\| `(leasehold_\w+)` \|", of_clients, re.MULTILINE))
    assert {name for name in explained if not name.startswith("leasehold_engine_")} == names


# -------------------------------------------------------------------- cardinality


def test_random_names_and_namespaces_stay_below_the_cap(hook, metrics):
    rng = random.Random(18)
    for number in range(10_000):
        name = "".join(rng.choices(string.ascii_letters + string.digits + "/:-_.", k=rng.randint(1, 40)))
        about = {"namespace": f"tenant-{number % 500}", "name": name, "fingerprint": str(number)}
        hook(event("attempted", **about))
        hook(event("granted", queued=number % 2 == 0, seconds=0.1, **about))
        hook(event("renewed", seconds=0.1, ttl=30.0, left=20.0, **about))
        hook(event("lost", reason="expired", seconds=1.0, **about))
        hook(event("stale_token", fence="sql", **about))
    samples = [sample for family in hook.collect() for sample in family.samples]
    assert len({(s.labels.get("namespace"), s.labels.get("group")) for s in samples if "group" in s.labels}) == 31
    assert len(samples) < 4200
    assert metrics("leasehold_acquires_total") == 10_000  # counted as `other`, not left out
    assert metrics("leasehold_groups_overflowed_total") > 9000
    assert not [sample.name for sample in samples if sample.name.endswith("_created")]


def test_group_can_be_chosen_by_a_function():
    chosen = Prometheus(CollectorRegistry(), group=lambda name: name[0])
    chosen(event("broken", name="orders"))
    chosen(event("conflict", name="orders"))
    (family,) = [family for family in chosen.collect() if family.name == "leasehold_conflicts"]
    assert family.samples[0].labels["group"] == "o"


def test_group_of_a_lock_goes_before_every_rule(metrics_of):
    hook = Metrics(group=lambda name: name[0])
    with Client("memory://", on_event=hook) as client:
        for name in ("orders/1", "orders/2"):
            with client.lock(name, group="checkout"):
                pass
        with client.lock("orders/2"), client.rwlock("orders/3").read(group="checkout"):
            pass
    values = metrics_of(hook)
    assert values("leasehold_acquires_total", group="checkout") == 3
    assert values("leasehold_hold_seconds_count", group="checkout", end="released") == 3
    assert values("leasehold_acquires_total", group="o") == values("leasehold_acquires_total") - 3 == 1


@pytest.mark.parametrize("group", ["x" * 81, "a\nb", 3])
def test_invalid_group_of_a_lock_is_refused(group):
    with Client("memory://") as client, pytest.raises(ConfigError, match="group must be printable text of at most 80"):
        client.lock("a", group=group)


def test_groups_of_locks_stay_below_the_cap(metrics_of):
    hook = Metrics()
    for number in range(1000):
        hook(event("conflict", group=f"g{number}"))
        hook(event("conflict", group=f"g{number}"))
    values = metrics_of(hook)
    assert values("leasehold_conflicts_total", group="other") == 2 * (1000 - 30)
    assert values("leasehold_groups_overflowed_total") == 1000 - 30


# ---------------------------------------------------------------------- gauges


def test_lease_that_is_lost_before_its_grant_is_reported_is_not_held(hook, metrics):
    """The watchdog's events come from another thread, and may come first."""
    hook(event("attempted"))
    hook(event("lost", fingerprint="f", reason="unknown"))
    hook(event("granted", fingerprint="f", queued=False, seconds=0.0))
    assert metrics("leasehold_held") == metrics("leasehold_acquiring") == 0
    assert metrics("leasehold_leases_lost_total", reason="unknown") == 1


def test_lease_at_risk_that_was_released_meanwhile_is_not_at_risk(hook, metrics):
    hook(event("attempted"))
    hook(event("granted", fingerprint="f", queued=False, seconds=0.0))
    hook(event("at_risk", fingerprint="f"))
    assert (metrics("leasehold_held"), metrics("leasehold_at_risk")) == (1, 1)
    hook(event("renewed", fingerprint="f", seconds=0.1))
    assert (metrics("leasehold_held"), metrics("leasehold_at_risk")) == (1, 0)
    hook(event("released", fingerprint="f", seconds=2.0))
    hook(event("at_risk", fingerprint="f"))
    assert (metrics("leasehold_held"), metrics("leasehold_at_risk")) == (0, 0)


@pytest.mark.parametrize(
    ("ended", "outcome", "path"),
    [
        ({"kind": "busy", "queued": False}, "busy", "direct"),
        ({"kind": "busy", "queued": True}, "timeout", "queued"),
        ({"kind": "failed", "queued": True, "error": "Unavailable"}, "unavailable", "queued"),
        ({"kind": "failed", "queued": False, "error": "CancelledError"}, "cancelled", "direct"),
        ({"kind": "failed", "queued": False, "error": "KeyboardInterrupt"}, "cancelled", "direct"),
        ({"kind": "failed", "queued": False, "error": "Mismatch"}, "error", "direct"),
        ({"kind": "unguaranteed"}, "unavailable", "direct"),
    ],
)
def test_end_of_an_acquire_has_one_outcome(ended, outcome, path, hook, metrics):
    hook(event("attempted"))
    assert metrics("leasehold_acquiring") == 1
    hook(event(**ended))
    assert metrics("leasehold_acquiring") == 0
    assert metrics("leasehold_acquires_total") == 1
    assert metrics("leasehold_acquires_total", outcome=outcome, path=path) == 1


def test_forked_child_counts_from_zero(hook, metrics):
    with Client("memory://", on_event=hook) as client, client.lock("a"):
        child = os.fork()
        if child == 0:
            zero = metrics("leasehold_held") == metrics("leasehold_acquires_total") == 0
            os._exit(0 if zero else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert metrics("leasehold_held") == 1


# ----------------------------------------------------------------- the hook itself


def test_second_hook_in_one_registry_is_refused_with_advice():
    registry = CollectorRegistry()
    Prometheus(registry)
    with pytest.raises(ConfigError, match="pass one hook to all clients"):
        Prometheus(registry)


def test_fan_passes_events_to_all_hooks_and_counts_failures(hook, metrics, caplog):
    def fails(_event: Event) -> None:
        raise RuntimeError("hook")

    seen: list[Event] = []
    with Client("memory://", on_event=fan(fails, hook, seen.append)) as client, client.lock("a"):
        assert [event.kind for event in seen] == ["attempted", "granted"]
    assert metrics("leasehold_acquires_total") == 1
    assert metrics("leasehold_hook_errors_total") == 3
    assert "the on_event hook failed on attempted of a" in caplog.text


def test_fan_refuses_what_is_not_a_hook():
    with pytest.raises(ConfigError, match="fan takes hooks"):
        fan(print, 3)


def test_telemetry_has_no_other_names():
    with pytest.raises(AttributeError, match="no attribute 'Statsd'"):
        telemetry.Statsd  # noqa: B018
