"""The faults of the lab: what each does to the contenders and servers of a run, and how it ends.

A fault is a function that injects, waits, and heals. It returns the instant from which the next holder is awaited:
that of the crash that took the lock away, or the end of the fault. A new fault is a function here, with its line in
`FAULTS`, and a row in `expectations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from harness.lab.contender import now
from harness.lab.setups import restart
from harness.lab.soak import interval

if TYPE_CHECKING:
    from harness.lab.run import Run
    from harness.servers.sites import Site


class Fault(NamedTuple):
    """`slow_ttl`: in a slow network, where deadlines are longer, too. `needs`: of the setup, see `Setup`."""

    title: str
    inject: Callable[[Run], float]
    needs: frozenset[str] = frozenset()
    slow_ttl: float | None = None
    pauses: bool = False  # contenders are paused: without a fence updates must be lost, or the fault did not bite
    crowd: bool = False  # another workload: see `contender.crowd`
    soaks: bool = False  # beside a load; what the run leaves behind is judged as well


# ------------------------------------------------------------------ clients


def client_kill(run: Run) -> float:
    """SIGKILL the holder. Another contender takes its place."""
    victim = run.long_holder(among=run.contenders[1:])  # the first contender lives through the run
    killed_at = now()
    run.kill(victim)
    run.start_contender()
    return killed_at


def client_pause(run: Run) -> float:
    """SIGSTOP the holder between its read and its write, until another contender has written."""
    victim = run.long_holder()
    paused_at = now()
    with run.pause(victim):
        run.await_write(other_than=victim, since=paused_at)
    return paused_at


def client_cut(run: Run) -> float:
    """Drop everything between the holder and the servers for two ttls."""
    victim = run.long_holder()
    cut_at = now()
    with run.silence(victim):
        for proxy in victim.link.all:
            proxy.cut()
        run.sleep(2 * run.ttl)
    for proxy in victim.link.all:
        proxy.restore()
    return cut_at


# ------------------------------------------------------------------ servers


def server_kill(run: Run) -> float:
    """SIGKILL the leader, and start it again on its data."""
    run.long_holder()
    run.setup.restart_leader(lambda: run.sleep(run.rng.uniform(0.1, 0.5 * run.ttl)))
    return now()


def server_pause(run: Run) -> float:
    """SIGSTOP the leader for one and a half ttls."""
    run.long_holder()
    leader = run.setup.leader()
    leader.pause()
    run.sleep(1.5 * run.ttl)
    leader.resume()
    return now()


def all_restart(run: Run) -> float:
    """SIGKILL all servers, and start them again on their data."""
    run.long_holder()
    for server in run.setup.servers:
        server.kill()
    run.sleep(run.rng.uniform(0.1, 0.5 * run.ttl))
    restart(*run.setup.servers)
    return now()


def partition(run: Run) -> float:
    """Cut the leader off from the other servers for three ttls. One contender is on its side, the others are not."""
    run.long_holder()
    setup, (alone, *others) = run.setup, run.contenders
    minority = setup.minority()
    majority = [server for server in setup.servers if server not in minority]
    refused = ([] if setup.decide(minority) else [alone]) + ([] if setup.decide(majority) else others)
    with run.silence(*refused):
        setup.partition(minority)
        for contender in run.contenders:
            reached = minority if contender is alone else majority
            for server, proxy in zip(setup.servers, contender.link.proxies, strict=True):
                if server not in reached:
                    proxy.cut()
            for proxy in contender.link.others if contender is alone else ():
                proxy.cut()
        run.sleep(3 * run.ttl)
    for proxy in run.proxies():
        proxy.restore()
    setup.heal_partition()
    return now()


def site_cut(run: Run) -> float:
    """Cut off the site of the holder, then that of the leader. Contenders there learn why they are refused, the others
    acquire the lock, and after the cut the contenders there acquire it again."""
    sites = run.setup.sites
    assert sites is not None
    for chosen in ("holder", "leader"):
        holder = run.long_holder()
        site = cast("Site", holder.link.site if chosen == "holder" else run.setup.leader().netns_host)  # type: ignore[attr-defined]
        there = [contender for contender in run.contenders if contender.link.site is site]
        with run.silence(*there):
            sites.cut(site)
            cut_at = now()
            run.report(f"{site.name}, the site of the {chosen}, is cut off")
            run.sleep(2 * run.ttl)
            run.await_reported_no_majority(there, since=cut_at)
            run.await_grant(now())
            run.report(f"after {now() - cut_at:.0f} s refused there, granted elsewhere")
        sites.heal()
        healed_at = now()
        run.long_holder(among=there)
        run.report(f"{site.name} acquired the lock {now() - healed_at:.0f} s after the cut")
    return healed_at


# ------------------------------------------------------------------ the network


def lost_answers(run: Run) -> float:
    """All requests arrive, and no answer does, three times for a moment: clients repeat what was executed already."""
    for _ in range(3):
        for proxy in run.proxies():
            proxy.lose_answers()
        run.sleep(run.rng.uniform(0.05, 0.8))
        for proxy in run.proxies():
            proxy.restore()
        run.sleep(0.2)
    return now()


def slow_network(run: Run) -> float:
    """Each request takes a second longer. A lease that is granted then must be kept, too."""
    return _delay(run, lambda: 1.0, grants=1)


def jitter(run: Run) -> float:
    """Each request takes up to 200 ms longer, some two seconds."""
    return _delay(run, lambda: 2.0 if run.rng.random() < 0.05 else run.rng.uniform(0.0, 0.2))


def _delay(run: Run, seconds: Callable[[], float], grants: int = 0) -> float:
    """A lease that was renewed before must be kept, as are the next `grants`. Others may be lost, if their grant was
    quick and their first renewal is not: it opens a connection, which takes several requests."""
    holder = run.long_holder()
    run.sleep(0.5 * run.ttl)
    run.must_keep(holder)
    for proxy in run.proxies():
        proxy.delay = seconds
    run.sleep(1.5 * run.ttl)
    for _ in range(grants):
        run.must_keep(run.long_holder())
        run.sleep(1.5 * run.ttl)
    for proxy in run.proxies():
        proxy.delay = None
    return now()


# ------------------------------------------------------------------ clocks and disks


def clock_forward(run: Run) -> float:
    """The leader's clock, and that of a majority, steps by 10 s, then by 60 s."""
    for seconds in (10.0, 70.0):
        run.long_holder()
        run.setup.set_clocks(run.clock_offset + seconds, majority=True)
        run.sleep(run.ttl)
    run.clock_offset += 70.0
    return now()


def clock_back(run: Run) -> float:
    """The leader's clock, and that of a majority, goes back an hour, and later forth again."""
    run.long_holder()
    run.setup.set_clocks(-3600.0, majority=True)
    run.sleep(2 * run.ttl)
    run.setup.set_clocks(0.0, majority=True)
    return now()


def clocks_apart(run: Run) -> float:
    """The leader's clock, or that of a minority, is 10 s ahead of the others."""
    run.long_holder()
    run.setup.set_clocks(10.0, majority=False)
    run.sleep(2 * run.ttl)
    return now()


def disk_full(run: Run) -> float:
    """The disk of one server is full for two ttls. A server that ends because of it is started again afterwards."""
    run.long_holder()
    run.setup.fill_disk()
    run.sleep(2 * run.ttl)
    run.setup.empty_disk()
    return now()


# ------------------------------------------------------------------ many at once


def crowd(run: Run) -> float:
    """Thousands of tasks in a few processes ask for the lock at the same moment, once each."""
    began = now()
    for contender in run.contenders:
        contender.order_long()  # it waits for a line to begin
    run.await_crowd()
    return began


def soak(run: Run) -> float:
    """One of the faults below, chosen at random. The next follows 15 s later."""
    chosen = run.rng.choice(SOAK if run.setup.servers else SOAK_WITHOUT_SERVER)
    began = now()
    run.take_samples()
    run.report(chosen)
    since = FAULTS[chosen].inject(run)
    run.await_grant(since)
    run.sleep(max(0.0, interval(run.seconds) - (now() - began)))
    return since


def in_turn(names: Sequence[str]) -> Fault:
    """These faults one after the other, on the same servers and contenders: for tests, where starting them takes longer
    than most faults."""
    (first, *others) = (FAULTS[name] for name in names)
    if others and any(fault.slow_ttl or fault.crowd for fault in (first, *others)):
        raise ValueError("a fault with a ttl or contenders of its own is injected alone")

    def inject(run: Run) -> float:
        since = first.inject(run)
        for name, fault in zip(names, others, strict=False):
            run.await_grant(since)
            run.report(f"{name} injected and healed")
            since = fault.inject(run)
        return since

    return first._replace(
        inject=inject,
        needs=frozenset().union(*(fault.needs for fault in (first, *others))),
        pauses=any(fault.pauses for fault in (first, *others)),
    )


_CLOCK: Final = frozenset({"clock"})
_HOSTS: Final = frozenset({"hosts"})
_DISK: Final = frozenset({"disk"})
_SITES: Final = frozenset({"sites"})

FAULTS: Final[dict[str, Fault]] = {
    "client-kill": Fault("the holder is killed", client_kill),
    "client-pause": Fault("the holder is stopped past its ttl", client_pause, pauses=True),
    "client-cut": Fault("the holder is cut off silently", client_cut),
    "server-kill": Fault("the leader is killed and started again", server_kill),
    "server-pause": Fault("the leader is stopped past the ttl", server_pause),
    "all-restart": Fault("all servers are killed and started again", all_restart),
    "partition": Fault("the leader is cut off from the others", partition, _HOSTS),
    "site-cut": Fault("one of three sites is cut off", site_cut, _SITES),
    "lost-answers": Fault("answers are lost, requests repeated", lost_answers),
    "slow-network": Fault("a second of delay on every request", slow_network, slow_ttl=8.0),
    "jitter": Fault("0 to 200 ms of delay, 2 s on every twentieth", jitter, slow_ttl=24.0),
    "clock-forward": Fault("the leader's clock steps 10 s, then 60 s ahead", clock_forward, _CLOCK),
    "clock-back": Fault("the leader's clock goes back an hour", clock_back, _CLOCK),
    "clocks-apart": Fault("the clock of a minority is 10 s ahead", clocks_apart, _CLOCK),
    "disk-full": Fault("a disk fills up, and later has room again", disk_full, _DISK),
    "crowd": Fault("thousands of tasks ask at once", crowd, crowd=True),
}

SOAK: Final = (
    "client-kill",
    "client-pause",
    "client-cut",
    "server-kill",
    "server-pause",
    "all-restart",
    "lost-answers",
)
SOAK_WITHOUT_SERVER: Final = ("client-kill", "client-pause")
SOAK_FAULT: Final = Fault("another fault every 15 s", soak, soaks=True)
