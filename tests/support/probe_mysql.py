"""What tests read and change inside the MySQL engine. What it shares with PostgreSQL is in `probe_sql.py`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from leasehold.engines.mysql import engine, listener
from leasehold.engines.mysql.driver import SafeConnection
from leasehold.engines.mysql.engine import MysqlEngine
from leasehold.engines.mysql.listener import MyListener
from leasehold.engines.mysql.session import MySession
from tests.support import probe
from tests.support.probe import Place
from tests.support.probe_sql import AnyEngine

LISTEN_SECONDS = Place(listener, "_LISTEN_SECONDS")  # how long the server's call that listens takes
MAX_TOKENS = Place(engine, "_MAX_TOKENS")  # that the engine remembers
LISTENER_STEPS = [Place(listener, "_listen_once")]  # functions that the listener's thread calls


def remembered_tokens(user: AnyEngine) -> dict[str, int]:
    """By id hash: the tokens of this engine's grants."""
    return cast(MysqlEngine, probe.engine(user))._tokens


def allow_login_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyMySQL 1.1 does, whatever the options say."""
    never = property(lambda connection: False, lambda connection, value: None)
    monkeypatch.setattr(SafeConnection, "_ssl_required", never, raising=False)


def pretend_received(session: MySession, data: bytes) -> None:
    """As if the server had sent this before the next call."""
    session._buffer += data


def liveness_session(listener: MyListener) -> Any:
    """The second session of the listener, whose end shows that the connection is lost."""
    return listener._liveness_session


def is_liveness_session_alive(listener: MyListener) -> bool:
    return listener._is_liveness_session_alive()


def make_ssl_context(settings: dict[str, Any]) -> Any:
    """What PyMySQL makes of the settings of TLS, without a connection."""
    return SafeConnection.__new__(SafeConnection)._create_ssl_ctx(settings)
