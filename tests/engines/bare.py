"""An engine without recipe or watchdog: nothing happens but what a test asks for."""

from __future__ import annotations

from typing import Any

from leasehold import engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads


class Bare:
    def __init__(self, url: str) -> None:
        self.runtime = Threads()
        self.book = Book(self.runtime, self.runtime.entropy(8).hex())
        config = EngineConfig.parse(url, 5.0)
        self.engine = engines.opener(config.scheme)(config, self.runtime, self.book)

    def by(self, seconds: float = 5.0) -> float:
        return self.runtime.now() + seconds

    def claim(self, name: str = "job", **fields: Any) -> Claim:
        secret = self.runtime.entropy(16).hex()
        return Claim("", name, secret, mark(secret), Holder("bare"), 30.0)._replace(**fields)

    def attempt(self, claim: Claim) -> Grant | Busy:
        return step(self.engine.attempt(claim, self.by()))

    def takes(self, claim: Claim) -> Claim:
        grant = self.attempt(claim)
        assert isinstance(grant, Grant), grant
        return claim._replace(token=grant.token)

    def release(self, claim: Claim) -> bool:
        return step(self.engine.release(claim, self.by()))

    def renew(self, claim: Claim) -> Any:
        return step(self.engine.renew([claim], self.by()))[0]
