"""What is recorded and alerted on. The rules file, the dashboard and docs/operations/runbook.md are made from it.

Thresholds that an operator may want to change have a name here, so that rule, dashboard and text agree.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["critical", "warning", "info"]

ACQUIRE_P95: Final = 0.05  # seconds
WAIT_P99: Final = 30  # seconds
ERRORS_WARNING: Final = 0.01
ERRORS_CRITICAL: Final = 0.05
RENEW_FAILURES: Final = 0.05
RENEW_MARGIN: Final = 0.33  # of the ttl; a healthy client has two thirds left
STORAGE_WARNING: Final = 0.8
STORAGE_CRITICAL: Final = 0.95
CACHE_HITS: Final = 0.7
CONTENTION: Final = 0.5
HELD_TOO_LONG: Final = 3600  # seconds
REPLICATION_LAG: Final = 10  # seconds
CLOCK_OFFSET: Final = 0.5  # seconds
PICTURE_AGE: Final = 15  # seconds

RUNBOOK_URL: Final = "https://leasehold.dev/docs/operations/runbook"


class Recorded(NamedTuple):
    """A series that Prometheus computes from others."""

    name: str
    expression: str


class Alert(NamedTuple):
    """`after`: how long the expression must hold. `runbook`: what it means, and what to do."""

    name: str
    severity: Severity
    after: str
    expression: str
    summary: str
    runbook: str

    @property
    def runbook_url(self) -> str:
        return f"{RUNBOOK_URL}#{self.name.lower()}"


def _quantile(share: float, metric: str, labels: str, selector: str, window: str) -> str:
    return f"histogram_quantile({share}, sum by ({labels}, le) (rate({metric}_bucket{selector}[{window}])))"


def _acquire_quantile(share: float) -> str:
    return _quantile(share, "leasehold_acquire_seconds", "engine", '{path="direct"}', "5m")


def _rate(labels: str, metric: str, selector: str = "") -> str:
    return f"sum by ({labels}) (rate({metric}{selector}[5m]))"


def _share(labels: str, metric: str, *selectors: str) -> str:
    """The share of what is selected in all, 0 if a selection has no series yet; nothing without traffic."""
    every = _rate(labels, metric)
    parts = [f"({_rate(labels, metric, selector)} or 0 * {every})" for selector in selectors]
    return f"({' + '.join(parts)}) / ({every} > 0)"


_ACQUIRES, _CACHE = "leasehold_acquires_total", "leasehold_server_cache_requests_total"
_UNEXPECTED_LOSS = 'leasehold_leases_lost_total{reason!~"max_hold|forked|broken"}'
_MEMBERS = "leasehold_engine_members"

RECORDED: Final = (
    Recorded("leasehold:acquire_seconds:p50", _acquire_quantile(0.5)),
    Recorded("leasehold:acquire_seconds:p95", _acquire_quantile(0.95)),
    Recorded("leasehold:acquire_seconds:p99", _acquire_quantile(0.99)),
    Recorded(
        "leasehold:wait_seconds:p99",
        _quantile(0.99, "leasehold_acquire_seconds", "engine, group", '{path="queued"}', "10m"),
    ),
    Recorded("leasehold:acquires:rate5m", _rate("engine", _ACQUIRES)),
    Recorded("leasehold:errors:ratio5m", _share("engine", _ACQUIRES, '{outcome=~"unavailable|error"}')),
    Recorded(
        "leasehold:contention:ratio5m",
        _share("engine, group", _ACQUIRES, '{path="queued"}', '{path="direct",outcome="busy"}'),
    ),
    Recorded("leasehold:renew_margin:p05", _quantile(0.05, "leasehold_renew_margin_ratio", "engine", "", "10m")),
    Recorded("leasehold:renew_failures:ratio5m", _share("engine", "leasehold_renewals_total", '{outcome="failed"}')),
    Recorded("leasehold:cache_hits:ratio5m", _share("instance", _CACHE, '{result="hit"}')),
)

ALERTS: Final = (
    Alert(
        "LeaseholdAcquireSlow",
        "critical",
        "5m",
        f"leasehold:acquire_seconds:p95 > {ACQUIRE_P95} and on (engine) leasehold:acquires:rate5m > 0.2",
        f"p95 of uncontended acquires on {{{{ $labels.engine }}}} is {{{{ $value | humanizeDuration }}}}; "
        f"the limit is {ACQUIRE_P95 * 1000:g} ms",
        "These acquires did not wait for a holder, so the engine or the network is slow. Compare "
        "leasehold_engine_call_seconds, or the output of `leasehold bench`, with what is usual. If calls are slow, "
        "check the engine's disk (etcd: fsync of its log; ZooKeeper: zk_max_latency; SQL: waits for row locks). If "
        "calls are fast and acquires are not, the client's or the server's machine has too little CPU.",
    ),
    Alert(
        "LeaseholdEngineDown",
        "critical",
        "30s",
        "leasehold_engine_up == 0",
        "{{ $labels.engine }} grants no locks, as seen from {{ $labels.instance }}",
        "No client can acquire, and held leases are lost when their ttl is over. Run `leasehold doctor` from the same "
        "machine: it says why. Repair the engine before you restart clients: clients retry by themselves. Do "
        "not break locks meanwhile.",
    ),
    Alert(
        "LeaseholdServerDown",
        "critical",
        "1m",
        'up{job="leasehold"} == 0',
        "Prometheus cannot scrape {{ $labels.instance }}",
        "Clients use the other servers if their URL names several. Read the last lines of the server's log. Leases do "
        "not end with a server: they end if they are not renewed within their ttl.",
    ),
    Alert(
        "LeaseholdNoLeader",
        "critical",
        "15s",
        "leasehold_engine_has_leader == 0",
        "{{ $labels.engine }} has no leader",
        "Reads may work, grants do not. Count the members that are up: without a majority no leader is elected. If "
        "all are up, look for a network partition, or for disks that are too slow for the election timeout.",
    ),
    Alert(
        "LeaseholdErrorsHigh",
        "critical",
        "5m",
        f"leasehold:errors:ratio5m > {ERRORS_CRITICAL} and on (engine) leasehold:acquires:rate5m > 0.2",
        "{{ $value | humanizePercentage }} of acquires on {{ $labels.engine }} end in an error",
        "Busy names are not counted here: these callers got no answer, or an error. Outcome `unavailable` of "
        "leasehold_acquires_total: see LeaseholdEngineDown. Outcome `error`: the class is in the log; usually Mismatch "
        "(one name, two kinds of lock) or missing rights, so look at the newest release of the caller.",
    ),
    Alert(
        "LeaseholdErrors",
        "warning",
        "10m",
        f"leasehold:errors:ratio5m > {ERRORS_WARNING} and on (engine) leasehold:acquires:rate5m > 0.2",
        "{{ $value | humanizePercentage }} of acquires on {{ $labels.engine }} end in an error",
        "See LeaseholdErrorsHigh; there is more time.",
    ),
    Alert(
        "LeaseholdLeaseLost",
        "warning",
        "0s",
        f"sum by (engine, group, reason) (increase({_UNEXPECTED_LOSS}[10m])) > 0",
        "{{ $value | humanize }} lease(s) of {{ $labels.group }} lost in 10 min: {{ $labels.reason }}",
        "`stalled`: the process did not run; look for garbage collection, a suspended machine, CPU throttling. "
        "`unreachable`: the engine did not answer for a whole ttl. `expired` or `unknown`: the engine no longer knows "
        "the claim; after a failover of Redis that is expected. Each loss is a warning in the log, with its token; "
        "`leasehold history NAME` shows it in context. If the ttl is too short, raise it.",
    ),
    Alert(
        "LeaseholdLeasesLostMany",
        "critical",
        "2m",
        f"sum by (engine) (increase({_UNEXPECTED_LOSS}[5m])) > 10",
        "{{ $value | humanize }} leases lost on {{ $labels.engine }} in 5 min",
        "So many losses at once come from the engine or the network, not from one process. See LeaseholdEngineDown. "
        "Then check that every resource has a fence: LeaseholdStaleTokenRejected may follow.",
    ),
    Alert(
        "LeaseholdStaleTokenRejected",
        "warning",
        "0s",
        "sum by (engine, group, fence) (increase(leasehold_stale_tokens_total[10m])) > 0",
        "a {{ $labels.fence }} fence refused an old token of {{ $labels.group }}",
        "The fence did its work: nothing was overwritten. But a holder continued after its lease had ended. Find "
        "it with `leasehold audit show --action stale_token`, and make it call `lease.check()` before each write.",
    ),
    Alert(
        "LeaseholdRenewMarginLow",
        "warning",
        "10m",
        f"leasehold:renew_margin:p05 < {RENEW_MARGIN}",
        "one renewal in twenty on {{ $labels.engine }} is confirmed with less than a third of the ttl left",
        "Two thirds are healthy. If the margin shrinks further, leases are lost. Either renewals are slow "
        "(leasehold_renew_seconds), or the process starts them late (too little CPU). Raise the ttl for now.",
    ),
    Alert(
        "LeaseholdRenewalsFailing",
        "warning",
        "5m",
        f"leasehold:renew_failures:ratio5m > {RENEW_FAILURES}",
        "{{ $value | humanizePercentage }} of renewals on {{ $labels.engine }} get no answer",
        "Leases are at risk, and lost when their ttl is over. Check the engine and the network to it at once: you "
        "have less than one ttl.",
    ),
    Alert(
        "LeaseholdWaitP99High",
        "warning",
        "10m",
        f"leasehold:wait_seconds:p99 > {WAIT_P99}",
        "p99 of waits for {{ $labels.group }} is {{ $value | humanizeDuration }}",
        "`leasehold ls` shows the holders and the queue. Remedies, in this order: hold for a shorter time, lock "
        "narrower names (orders/42 instead of orders), a semaphore or a read lock, no lock at all (once, optimistic "
        "updates).",
    ),
    Alert(
        "LeaseholdContention",
        "info",
        "15m",
        f"leasehold:contention:ratio5m > {CONTENTION}",
        "{{ $value | humanizePercentage }} of acquires of {{ $labels.group }} found the name busy",
        "Not an error by itself: a queue of jobs looks like this. Look into it if people wait for these callers.",
    ),
    Alert(
        "LeaseholdLockHeldTooLong",
        "warning",
        "5m",
        'max by (engine, namespace, group) ({__name__=~"leasehold_token_age_seconds|leasehold_oldest_hold_seconds"}) '
        f"> {HELD_TOO_LONG}",
        "a lock of {{ $labels.group }} has been held for {{ $value | humanizeDuration }}",
        "`leasehold ls` shows the holder. If its work is done or stuck, stop the process: the lease ends by itself "
        "within its ttl. Break the lock only if you cannot stop the process. Leaders of elections hold for ever by "
        "design: exclude their group in your copy of the rule. The option `max_hold` bounds how long a lock can be "
        "held.",
    ),
    Alert(
        "LeaseholdDeadlock",
        "warning",
        "1m",
        "leasehold_deadlocks > 0",
        "{{ $value }} deadlock(s) on {{ $labels.engine }}",
        "`leasehold deadlocks` shows who waits for whom, and which grant costs least to break. Acquire several names "
        "with `multilock`, which cannot deadlock.",
    ),
    Alert(
        "LeaseholdStorageFilling",
        "warning",
        "1m",
        f"leasehold_engine_storage_used_ratio > {STORAGE_WARNING}",
        "{{ $labels.store }} of {{ $labels.member }} is {{ $value | humanizePercentage }} full",
        "`quota` (etcd): compact, defragment, or raise --quota-backend-bytes; at 100 % etcd refuses every grant until "
        "the alarm NOSPACE is cleared, as docs/operations/prevented-outage.md shows. `filesystem`: add space; etcd, "
        "ZooKeeper, SQL servers and Redis with AOF stop when it is full. `maxmemory` (Redis): raise it; never set an "
        "eviction policy on a Redis that keeps locks.",
    ),
    Alert(
        "LeaseholdStorageFull",
        "critical",
        "30s",
        f"leasehold_engine_storage_used_ratio > {STORAGE_CRITICAL}",
        "{{ $labels.store }} of {{ $labels.member }} is {{ $value | humanizePercentage }} full",
        "See LeaseholdStorageFilling, and act now.",
    ),
    Alert(
        "LeaseholdCacheHitsLow",
        "warning",
        "15m",
        f"leasehold:cache_hits:ratio5m < {CACHE_HITS} and on (instance) {_rate('instance', _CACHE)} > 1",
        "only {{ $value | humanizePercentage }} of status queries to {{ $labels.instance }} are answered from its "
        "cache",
        "Callers ask with `fresh=1`, or --picture-max-age is too short for how often they ask. Grants never use this "
        "cache: a miss costs the engine work, and nothing else.",
    ),
    Alert(
        "LeaseholdQuorumAtRisk",
        "warning",
        "1m",
        f'{_MEMBERS}{{state="reachable"}} <= on (engine, instance) floor({_MEMBERS}{{state="voting"}} / 2) + 1 '
        f'and on (engine, instance) {_MEMBERS}{{state="voting"}} > 2',
        "{{ $labels.engine }}: {{ $value }} members are left, one more loss stops all grants",
        "Repair or replace the missing member. Do not restart another one meanwhile.",
    ),
    Alert(
        "LeaseholdLeaderFlapping",
        "warning",
        "0s",
        "sum by (engine) (increase(leasehold_engine_leader_changes_total[15m])) > 3",
        "{{ $labels.engine }} changed its leader {{ $value | humanize }} times in 15 min",
        "The disk is too slow, the CPU too busy, or the network unreliable. On etcd each change also restarts the ttl "
        "of every lease, so a dead holder keeps its name longer.",
    ),
    Alert(
        "LeaseholdReplicationLag",
        "warning",
        "5m",
        f"leasehold_engine_replication_lag_seconds > {REPLICATION_LAG}",
        "a replica of {{ $labels.member }} is {{ $value | humanizeDuration }} behind",
        "If this replica is promoted now, it has no record of the grants of that time: two holders are possible. "
        "Prevent the failover, or make the primary wait for replicas (synchronous_standby_names, "
        "min-replicas-to-write).",
    ),
    Alert(
        "LeaseholdClockOffset",
        "warning",
        "5m",
        f"abs(leasehold_engine_clock_offset_seconds) > {CLOCK_OFFSET}",
        "the clock of {{ $labels.member }} differs by {{ $value }} s",
        "Clients count leases by monotonic clocks, so no lease is affected by a constant offset. But times in logs "
        "and audit records do not match, and a jump of the clock of Redis or of an SQL server ends leases early or "
        "late. Repair NTP.",
    ),
    Alert(
        "LeaseholdEvictions",
        "critical",
        "0s",
        "increase(leasehold_engine_evictions_total[10m]) > 0",
        "{{ $labels.member }} evicted keys: locks may be among them",
        "Set maxmemory-policy to noeviction, raise maxmemory, and give locks a Redis of their own. "
        "LeaseholdStaleTokenRejected fires if a fence refused one of two holders.",
    ),
    Alert(
        "LeaseholdUnsafeSetting",
        "warning",
        "10m",
        "leasehold_engine_unsafe_settings > 0",
        "{{ $labels.member }}: {{ $labels.setting }} weakens what {{ $labels.engine }} promises",
        "`leasehold doctor` says what the setting puts at risk, and what to set instead.",
    ),
    Alert(
        "LeaseholdBreakerOpen",
        "warning",
        "1m",
        "leasehold_server_breaker_state == 2",
        "{{ $labels.instance }} refuses acquires: {{ $labels.engine }} did not answer",
        "Too many calls failed. Renewals and releases are still sent; acquires are refused at once. The server "
        "retries by itself: repair the engine.",
    ),
    Alert(
        "LeaseholdShedding",
        "warning",
        "5m",
        'sum by (instance, reason) (rate(leasehold_server_shed_total{reason!="draining"}[5m])) > 0',
        "{{ $labels.instance }} refuses requests: {{ $labels.reason }}",
        "Acquires are refused first, then lists, then releases; renewals never. Add a server: servers share "
        "the engine. If one client is the cause, lower its limit.",
    ),
    Alert(
        "LeaseholdAuditFailing",
        "critical",
        "0s",
        "increase(leasehold_audit_errors_total[5m]) > 0",
        "{{ $labels.instance }} could not write its audit log",
        "The disk is full, or the file cannot be written; the log says which. If the audit log is required, grants "
        "are refused meanwhile; if not, a record `gap` says later how many records are missing.",
    ),
    Alert(
        "LeaseholdLockBroken",
        "info",
        "0s",
        "sum by (engine, namespace) (increase(leasehold_breaks_total[5m])) > 0",
        "an operator broke a lock in {{ $labels.namespace }}",
        "`leasehold audit show --action break` shows who broke which lock, and why. There is nothing to do.",
    ),
    Alert(
        "LeaseholdPictureOld",
        "warning",
        "1m",
        f"leasehold_server_picture_age_seconds > {PICTURE_AGE}",
        "the state that {{ $labels.instance }} shows is {{ $value | humanizeDuration }} old",
        "The engine answers calls, but not `inspect`, or it has very many names. Grants do not depend on it.",
    ),
)
