"""The verbs of the etcd engine. queue.py decides who holds a name; attempt.py makes one attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.base import fixed_limits
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.attempt import EtcdAttempt, read_token_base
from leasehold.engines.etcd.client_state import EtcdClientState
from leasehold.engines.etcd.inspect import list_holdings
from leasehold.engines.etcd.leases import MIN_TTL
from leasehold.engines.etcd.release import EtcdRelease, break_grant, decline_first, send_release
from leasehold.engines.etcd.renew import EtcdRenewal
from leasehold.engines.etcd.rpc import RpcClient
from leasehold.engines.etcd.url import parse_url
from leasehold.engines.registry import ClaimRegistry, wait_for_wakeup
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

TRAITS: Final = Traits(slots=False, resizable=False, min_ttl=float(MIN_TTL), ttl_step=1.0, survives="restart")

_RENEW_BATCH: Final = 100  # keys read in one transaction; etcd's default limit is 128 operations
_CLOSE_TIMEOUT: Final = 0.3  # seconds to revoke unused leases; those that are left expire


class EtcdEngine:
    queues_at_once = True  # a watch needs no preparation, so every claim that may wait joins the queue at once

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, client_state: EtcdClientState) -> None:
        self._runtime, self._registry, self._client_state = runtime, registry, client_state
        self.root = client_state.url.root
        self.rpc = RpcClient(client_state.url, runtime, client_state.memory)
        registry.engines.add(self)

    @property
    def traits(self) -> Traits:
        client_state = self._client_state
        member_count, endpoint_count = client_state.member_count, len(client_state.url.endpoints)
        # The client must know more members than may fail, so that it can reach one of those that are left.
        survives_minority = member_count >= 3 and endpoint_count > (member_count - 1) // 2
        if (client_state.leases.min_ttl, survives_minority) == (MIN_TTL, False):
            return TRAITS
        return TRAITS._replace(
            min_ttl=float(client_state.leases.min_ttl), survives="minority" if survives_minority else "restart"
        )

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        waiter = self._registry.waiting.get(claim.id_hash)
        notified = waiter is not None and waiter.woken
        self._client_state.check_history()
        asked_at = self._runtime.now()
        self._client_state.get_claim_state(claim)  # before the watchdog sees the waiter: it then knows that it is new
        if claim.queue:
            # Before the request is sent (E4), but after `check_history`: a claim that is refused there is no waiter.
            self._registry.add_waiter(claim, self._runtime)
        claim_state, caller = await self._client_state.begin_attempt(claim, deadline)
        claim_state.delay, claim_state.min_hold = claim.delay, claim.min_hold
        if not claim_state.create_revision:  # it joins the queue
            claim_state.renewed_at = asked_at
        try:
            attempt = EtcdAttempt(self._client_state, claim_state, self.rpc, self._runtime, claim, asked_at, deadline)
            return await attempt.run(notified)
        except messages.MalformedReply as error:
            raise _to_unavailable(error) from error
        except ConfigError:  # refused: if nothing was written, there is nothing to release
            if not claim_state.create_revision and not claim_state.has_unconfirmed_write:
                self._client_state.remove_claim(claim, claim_state)
            raise
        finally:
            claim_state.mutex.release(caller)

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._registry.waiting.get(claim.id_hash):
            await wait_for_wakeup(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: list[Alive | Gone | Unavailable] = []
        for begin in range(0, len(claims), _RENEW_BATCH):
            batch = claims[begin : begin + _RENEW_BATCH]
            try:
                replies += await EtcdRenewal(self._client_state, self.rpc, self._runtime, batch, deadline).run()
            except LeaseholdError as error:
                unavailable = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="etcd")
                replies += [unavailable] * len(batch)
            except messages.MalformedReply as error:
                replies += [_to_unavailable(error)] * len(batch)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        self._registry.remove_waiter(claim.id_hash)
        try:
            return await EtcdRelease(self._client_state, self.rpc, self._runtime, claim, deadline).run()
        except ConfigError as error:  # etcd permitted this when the claim was granted, and may permit it again
            raise Unavailable(str(error), engine="etcd") from error
        except messages.MalformedReply as error:
            raise _to_unavailable(error) from error

    async def decline(self, claim: Claim, deadline: float) -> bool:
        try:
            return await decline_first(self._client_state, self.rpc, claim, deadline)
        except messages.MalformedReply as error:
            raise _to_unavailable(error) from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        try:
            return await break_grant(self._client_state, self.rpc, namespace, name, token, deadline)
        except messages.MalformedReply as error:
            raise _to_unavailable(error) from error

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        raise fixed_limits(TRAITS, "etcd")

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return await list_holdings(
            self._client_state, self.rpc, namespace, prefix, exact, self._runtime.wall(), deadline
        )

    async def ping(self, deadline: float) -> None:
        try:
            self._client_state.token_base = await read_token_base(self._client_state, self.rpc, self._runtime, deadline)
            listed = await self.rpc.call(messages.MEMBERS, messages.EmptyMessage(), deadline)
        except messages.MalformedReply as error:
            raise _to_unavailable(error) from error
        self._client_state.member_count = max(1, len(listed.members))

    async def rebase(self, floor: int, deadline: float) -> int:
        """Make every new token exceed `floor` and all tokens that were based on the clock: for use after data were
        restored from a snapshot. Returns the number after which tokens now begin."""
        key = queue.token_base_key(self._client_state.url.root)
        while True:
            (found,) = (await self.rpc.call(messages.RANGE, messages.RangeRequest(key), deadline)).kvs or (
                messages.KeyValue(key),
            )
            old = queue.parse_token_base(found.value)
            new = max(int(self._runtime.wall() * 1_000_000), floor, old + 1)
            self._client_state.parse_token_base(b"%d" % new)
            unchanged = messages.Compare(messages.EQUAL, messages.MOD, key, mod_revision=found.mod_revision)
            txn = messages.TxnRequest((unchanged,), (messages.RequestOp(put=messages.PutRequest(key, b"%d" % new)),))
            if (await self.rpc.call(messages.TXN, txn, deadline)).succeeded:
                return new

    def forget(self, claim: Claim) -> None:
        self._registry.remove_waiter(claim.id_hash)
        # None: nothing was sent for this claim, or everything was answered.
        claim_state = self._client_state.find_claim_state(claim)
        if claim_state is not None and claim_state.is_empty:
            self._client_state.remove_claim(claim, claim_state)
        elif claim_state is not None:
            self._registry.retry_release(claim)  # first: if this method is interrupted, the release is still pending
            send_release(self._client_state, self.rpc, claim, claim_state)

    def disown(self, claim: Claim) -> None:
        """The claim's etcd leases are neither renewed nor revoked: its key lives on until they expire."""
        self._registry.disown_waiter(claim.id_hash)
        claim_state = self._client_state.find_claim_state(claim)
        if claim_state is not None and claim.id_hash not in self._registry.pending_releases:
            self._client_state.remove_claim(claim, claim_state)

    def after_fork(self) -> None:
        self.rpc.after_fork()
        self._client_state.after_fork()

    async def close(self) -> None:
        if self._registry.remove_engine(self):
            self._client_state.watcher.close()
            await self._client_state.leases.close(self.rpc, self._runtime.now() + _CLOSE_TIMEOUT)
        self.rpc.close()


def _to_unavailable(error: messages.MalformedReply) -> Unavailable:
    return Unavailable(f"etcd sent an invalid reply: {error}", engine="etcd")


def open(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> EtcdEngine:
    """`etcd://[user:password@]host:port,host:port/prefix`; `etcds://` with `ca=`, `cert=` and `key=` for TLS."""
    client_state = registry.shared.get("etcd")
    if not isinstance(client_state, EtcdClientState):  # the client's first engine instance
        client_state = registry.shared["etcd"] = EtcdClientState(parse_url(config), runtime, registry)
    return EtcdEngine(runtime, registry, client_state)
