"""An engine without client or watchdog: it does only what the test calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leasehold import engines
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Busy, Claim, Grant, Holder, Holding
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads


class BareEngineDriver:
    def __init__(self, url: str) -> None:
        self.runtime = Threads()
        self.registry = ClaimRegistry(self.runtime, self.runtime.random_bytes(8).hex())
        config = EngineConfig.parse(url, 5.0)
        self.engine = engines.opener(config.scheme)(config, self.runtime, self.registry)

    def deadline(self, seconds: float = 5.0) -> float:
        return self.runtime.now() + seconds

    def claim(self, name: str = "job", **fields: Any) -> Claim:
        secret = self.runtime.random_bytes(16).hex()
        return Claim("", name, secret, hash_id(secret), Holder("bare"), 30.0)._replace(**fields)

    def attempt(self, claim: Claim) -> Grant | Busy:
        return run_sync(self.engine.attempt(claim, self.deadline()))

    def acquire(self, claim: Claim) -> Claim:
        grant = self.attempt(claim)
        assert isinstance(grant, Grant), grant
        return claim._replace(token=grant.token)

    def release(self, claim: Claim, seconds: float = 5.0) -> bool | None:
        return run_sync(self.engine.release(claim, self.deadline(seconds)))

    def renew(self, claim: Claim) -> Any:
        return run_sync(self.engine.renew([claim], self.deadline()))[0]

    def break_(self, claim: Claim) -> bool:
        return run_sync(self.engine.break_(claim.namespace, claim.name, claim.token, self.deadline()))

    def inspect(self) -> Sequence[Holding]:
        return run_sync(self.engine.inspect("", "", False, self.deadline()))
