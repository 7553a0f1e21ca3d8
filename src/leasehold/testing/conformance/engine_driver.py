"""One client at the engine interface: no client code and no watchdog, so the engine gets only the calls of the case."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypedDict, Unpack

from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines.base import Engine
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Kind, Mode

if TYPE_CHECKING:
    from leasehold.testing.conformance.context import CaseContext


class ClaimFields(TypedDict, total=False):
    namespace: str
    ttl: float
    mode: Mode
    kind: Kind
    limit: int
    delay: float
    min_hold: float
    queue: bool


class EngineDriver:
    """The engine's verbs, each with a deadline, and the usual assertions about their answers."""

    def __init__(self, trial: CaseContext) -> None:
        machine = trial.rig.client_path()
        self.context = trial
        self.runtime = trial.rig.runtime(trial.mode)
        self.registry = ClaimRegistry(self.runtime, self.runtime.random_bytes(8).hex())
        config = EngineConfig.parse(machine.url, trial.call_timeout)
        self.engine: Engine = machine.opener(config, self.runtime, self.registry)
        trial.rig.join(self, machine)

    def claim(self, name: str = "job", **fields: Unpack[ClaimFields]) -> Claim:
        claim_id = self.runtime.random_bytes(16).hex()
        holder = Holder("seat", "host", 1, "conformance")
        plain = Claim(self.context.namespace, name, claim_id, hash_id(claim_id), holder, self.context.ttl)
        return plain._replace(**fields)

    def waiter(self, name: str = "job", **fields: Unpack[ClaimFields]) -> Claim:
        return self.claim(name, **fields)._replace(queue=True)

    def now(self) -> float:
        return self.runtime.now()

    def deadline(self) -> float:
        return self.now() + self.context.call_timeout

    async def attempt(self, claim: Claim) -> Grant | Busy:
        return await self.engine.attempt(claim, self.deadline())

    async def granted(self, claim: Claim) -> Grant:
        reply = await self.attempt(claim)
        assert isinstance(reply, Grant), f"expected a grant of {claim.name}, not {reply}"
        return reply

    async def busy(self, claim: Claim) -> Busy:
        reply = await self.attempt(claim)
        assert isinstance(reply, Busy), f"expected {claim.name} to be busy, not {reply}"
        return reply

    async def acquire(self, claim: Claim) -> Claim:
        """Acquire, and return the claim with the token of its grant, as a renewal needs it."""
        return claim._replace(token=(await self.granted(claim)).token)

    async def refused_before(self, claim: Claim, instant: float) -> None:
        """An attempt now answers busy. If the machine is too slow to ask before `instant`, a grant is correct too."""
        reply = await self.attempt(claim)
        assert isinstance(reply, Busy) or self.now() >= instant, f"{claim.name} was granted too early: {reply}"
        if isinstance(reply, Grant):
            await self.release(claim)

    async def granted_within(self, claim: Claim, seconds: float) -> Grant:
        """The claim is granted after `seconds`, or sooner."""
        if self.context.rig.can_advance_clock:
            await self.context.pass_time(seconds)
            return await self.granted(claim)
        found: list[Grant] = []

        async def asked() -> bool:
            with suppress(Mismatch):  # while the grant of a dead holder of another kind has not expired
                reply = await self.attempt(claim)
                found.extend([reply] if isinstance(reply, Grant) else [])
            return bool(found)

        await self.context.until(asked, f"{claim.name} is granted", seconds)
        return found[0]

    async def renew(self, *claims: Claim) -> Sequence[Alive | Gone | Unavailable]:
        return await self.engine.renew(claims, self.deadline())

    async def alive(self, claim: Claim) -> Alive:
        (reply,) = await self.renew(claim)
        assert isinstance(reply, Alive), f"expected {claim.name} to be alive, not {reply}"
        return reply

    async def alive_before(self, claim: Claim, instant: float) -> Alive | None:
        """The same. If the machine is too slow to ask before `instant`, the claim may be gone: None."""
        (reply,) = await self.renew(claim)
        if isinstance(reply, Gone) and self.now() >= instant:
            return None
        assert isinstance(reply, Alive), f"expected {claim.name} to be alive, not {reply}"
        return reply

    async def gone(self, claim: Claim) -> Gone:
        (reply,) = await self.renew(claim)
        assert isinstance(reply, Gone), f"expected {claim.name} to be gone, not {reply}"
        return reply

    async def release(self, claim: Claim) -> bool:
        return bool(await self.engine.release(claim, self.deadline()))

    async def decline(self, claim: Claim) -> bool:
        return await self.engine.decline(claim, self.deadline())

    async def break_(self, claim: Claim) -> bool:
        return await self.engine.break_(claim.namespace, claim.name, claim.token, self.deadline())

    async def set_limit(self, limit: int | None, name: str = "job") -> None:
        await self.engine.set_limit(self.context.namespace, name, limit, self.deadline())

    async def inspect(self, prefix: str = "", exact: bool = False) -> Sequence[Holding]:
        return await self.engine.inspect(self.context.namespace, prefix, exact, self.deadline())
