"""One name in two implementations: the pure state machine (core/lock_state.py) and the procedures of a SQL server.

The procedures are the real ones, in their own schema. The tests replace three of them: the clock, the check that a
client is reachable, and the notification. Tokens of model and server rise by different steps, so `model_token` maps
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from harness.rigs import mysql, postgresql
from leasehold.core.lock_state import LockState, mismatch
from leasehold.core.queue_entry import Context, Notification, TokenCounter
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.mysql.session import literals
from leasehold.engines.postgresql import schema as postgresql_schema
from leasehold.engines.sql.codec import holdings, micros, seconds
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from tests.support import probe_lock_state

PG_FAKES = """
create table model.world (now bigint not null);
insert into model.world values (0);
create table model.unreachable (client text primary key);
create table model.notified (nr serial, client text, word text, id_hash text, after bigint);
create or replace function model.lh_now_v1() returns bigint language sql volatile as 'select now from model.world';
create or replace function model.lh_reachable_v1(_client text) returns boolean language sql volatile as
    'select not exists (select 1 from model.unreachable where client = _client)';
create or replace function model.lh_notify_v1(
    _client text, _notification text, _id_hash text, _after bigint, _namespace text, _name text
) returns void language sql volatile as
    'insert into model.notified (client, word, id_hash, after) values (_client, _notification, _id_hash, _after)';
create or replace function model.lh_prepare_v1(_lock_timeout_ms integer, _durable boolean) returns text language sql
    as 'select null::text';
create function model.look() returns void language plpgsql as $$
begin
    perform model.lh_sweep_name_v1('ns', 5, 'name', model.lh_lock_bucket_v1('ns', 5, 1000, true));
end $$;
"""

CLOCK_SQL = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
MY_FAKES = """
create table world (now bigint not null);
insert into world values (0);
create table unreachable (client varbinary(64) primary key);
create table notified (client varbinary(64));
delimiter $$
create or replace procedure lh_reachable_v1(_client varbinary(64), out _reachable boolean)
begin
    set _reachable = not exists (select 1 from unreachable where client = _client);
end
$$
create or replace procedure lh_notify_v1(_client varbinary(64))
begin
    insert into notified values (_client);
end
$$
create procedure look()
begin
    declare _t, _last bigint;
    call lh_begin_v1(1000);
    call lh_lock_bucket_v1('ns', 5, _t, _last);
    call lh_sweep_name_v1('ns', 5, 'name', _t);
    commit;
end
$$
delimiter ;
"""


@dataclass
class SqlModel:
    """Model and server with one clock and one set of unreachable clients. Subclasses call a server's procedures."""

    db: Any
    now: float = 1000.0
    unreachable: set[str] = field(default_factory=set)
    counter: TokenCounter = field(default_factory=TokenCounter)
    lock_state: LockState | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # server token -> model token

    tables = ("lh_grant", "lh_waiter", "lh_queue", "lh_bucket", "unreachable", "notified")

    def __post_init__(self) -> None:
        for table in self.tables:
            self.ask(f"delete from {table}")
        self.advance_clock(0.0)

    @classmethod
    def open_session(cls) -> Iterator[Any]:
        """Create the schema, yield a session, and drop the schema. Raises `Absent`."""
        raise NotImplementedError

    def ask(self, query, *values):
        raise NotImplementedError

    def call(self, verb: str, *values) -> list[tuple]:
        """Call a verb as the engine does; return the rows as text."""
        raise NotImplementedError

    def sweep(self) -> None:
        raise NotImplementedError

    def take_notifications(self) -> list[Notification]:
        """The notifications that the server has sent since the last call."""
        raise NotImplementedError

    def expected_notifications(self, notifications: list[Notification]) -> list[Notification]:
        """Those of the model's notifications that this server sends, in the server's order."""
        return notifications

    def advance_clock(self, seconds: float) -> None:
        self.now += seconds
        self.ask("update world set now = %s", micros(self.now))

    def set_reachable(self, client: str, reachable: bool) -> None:
        (self.unreachable.discard if reachable else self.unreachable.add)(client)
        self.ask("delete from unreachable where client = %s", client)
        if not reachable:
            self.ask("insert into unreachable values (%s)", client)

    def run_model(self, verb, kind="lock", limit=1):
        context = Context(self.now, lambda: self.counter.next(0), lambda client: client not in self.unreachable)
        lock_state = self.lock_state or LockState(self.now, kind, limit)
        lock_state.holders = dict(sorted(lock_state.holders.items()))  # on a tie the server shows the older grant
        probe_lock_state.plan_waiter_scan(lock_state, self.now)  # the server ignores expired waiters in every call
        try:
            answer, notifications = verb(lock_state, context)
        except Mismatch as error:
            return str(error), []
        self.lock_state = None if lock_state.empty and not lock_state.limit_set else lock_state
        return answer, notifications

    def model_token(self, token):
        """The model's token for a token of the server. A new server token must exceed all earlier ones."""
        if token not in self.tokens:
            assert token > max(self.tokens, default=0), "the server's token did not rise (E3)"
            self.tokens[token] = max(self.tokens.values(), default=0) + 1
        return self.tokens[token]

    def learn_tokens(self) -> None:
        for (token,) in self.ask("select token from lh_grant order by token"):
            self.model_token(token)

    # -------------------------------------------------------- the server's verbs

    def attempt(self, claim: Claim, client: str):
        values = ("ns", 5, "name", claim.id_hash, client, *claim.holder, claim.mode, claim.kind, claim.limit)
        options = (micros(claim.ttl), micros(claim.delay), micros(claim.min_hold), claim.queue, 8, 1000)
        ((answer, token, life, slot, *busy),) = self.call("attempt", *values, *options)
        self.learn_tokens()
        if answer != "1":
            position, *holder, kind, grant_limit = busy
        if answer == "2":
            return str(mismatch("name", claim.kind, claim.limit, kind, int(grant_limit)))
        token = None if token is None else self.model_token(int(token))
        if answer == "1":
            return Grant(token, seconds(life), None if slot is None else int(slot))
        label, host, pid, purpose = holder
        return Busy(
            None if life is None else seconds(life),
            None if position is None else int(position),
            token,
            None if label is None else Holder(label, host, int(pid), purpose),
        )

    def renew(self, claim: Claim):
        if not claim.token:
            ((_, known_text, _),) = self.call("heartbeat", ["ns"], [5], ["name"], [claim.id_hash], 1000)
            return Alive(WAITER_TTL) if known_text == "t" else Gone()
        columns = (["ns"], ["name"], [claim.id_hash], [self.server_token(claim.token)], [micros(claim.ttl)])
        ((_, life, expired),) = self.call("renew", *columns, 1000)
        return Alive(seconds(life)) if life is not None else Gone("expired" if expired == "t" else "unknown")

    def server_token(self, token: int) -> int:
        return next((server_token for server_token, model_token in self.tokens.items() if model_token == token), 7)

    def release(self, id_hash: str, keep: bool, held: bool):
        rows = self.call("release", "ns", 5, "name", id_hash, keep, held, 1000, *self.release_token(id_hash))
        return rows in ([], [("t",)])

    def release_token(self, id_hash: str) -> tuple[int, ...]:
        """The extra argument of a release on MySQL: the token."""
        return ()

    def decline(self, id_hash: str, client: str):
        return self.call("decline", "ns", 5, "name", id_hash, client, 1000) == [("t",)]

    def break_(self, token: int):
        return self.call("break", "ns", 5, "name", self.server_token(token), 1000) == [("t",)]

    def set_limit(self, limit: int | None):
        return self.call("set_limit", "ns", 5, "name", limit, 1000) == [("t",)]

    def compare_inspect(self) -> None:
        """Assert that model and server show the same holdings. Changes neither."""
        self.learn_tokens()
        rows = [json.dumps(row).encode() for row in self.call("inspect", "ns", "name", True)]
        found = holdings("ns", rows, json.loads, "sql")
        lock_state = deepcopy(self.lock_state) or LockState(self.now)
        lock_state.expire(self.now)
        expected = list(lock_state.holdings("ns", "name", self.now))
        translated = [holding._replace(token=holding.token and self.tokens[holding.token]) for holding in found]
        assert [rounded(holding) for holding in translated] == [rounded(holding) for holding in expected]

    def row_count(self) -> int:
        tables = ("lh_grant", "lh_waiter", "lh_queue")
        return sum(self.ask(f"select count(*) from {table}")[0][0] for table in tables)


def rounded(holding):
    """Round times and cut fingerprints: the server shows the beginning and the end of an id hash, here one letter."""
    times = {"age": round(holding.age, 5), "left": round(holding.left, 5)}
    return holding._replace(**times, fingerprint=holding.fingerprint[:1], owner=holding.owner[:1])


class PostgresqlModel(SqlModel):
    @classmethod
    def open_session(cls) -> Iterator[Any]:
        with postgresql.server.own().connect() as session:
            session.execute("drop schema if exists model cascade")
            session.execute((postgresql_schema.text("model") + PG_FAKES).encode())
            session.execute("set synchronous_commit = off")
            session.execute("set search_path = model")
            yield session
            session.execute("drop schema model cascade")

    def ask(self, query, *values):
        cursor = self.db.execute(query, values)
        return cursor.fetchall() if cursor.description else []

    def call(self, verb: str, *values) -> list[tuple]:
        rows = self.ask(f"select * from lh_{verb}_v1({', '.join(['%s'] * len(values))})", *values)
        if verb == "attempt":  # JSON, already decoded by psycopg
            rows = [reply for (reply,) in rows]
        return [
            tuple(None if v is None else str(v)[0].lower() if isinstance(v, bool) else str(v) for v in row)
            for row in rows
        ]

    def sweep(self) -> None:
        self.ask("select look()")

    def take_notifications(self) -> list[Notification]:
        rows = self.ask("delete from notified returning nr, client, word, id_hash, after")
        return [
            Notification(client, notification, id_hash, after / 1e6)
            for _, client, notification, id_hash, after in sorted(rows)
        ]


class MysqlModel(SqlModel):
    """On MySQL a notification is table state that its client has not read yet, and a break sends none."""

    seen_notifications: frozenset[tuple] = frozenset()
    release_count: int = 0

    @classmethod
    def open_session(cls) -> Iterator[Any]:
        with mysql.server.own().connect() as session, session.cursor() as cursor:
            cursor.execute("drop database if exists model")
            script = mysql_schema.text("model").replace(CLOCK_SQL, "(select now from world)") + MY_FAKES
            for statement in mysql_schema.statements(script):
                cursor.execute(statement)
            yield cursor
            cursor.execute("drop database model")

    def ask(self, query, *values):
        self.db.execute(query, values)
        return [tuple(each.decode() if isinstance(each, bytes) else each for each in row) for row in self.db.fetchall()]

    def call(self, verb: str, *values) -> list[tuple]:
        rows = self.ask(f"call lh_{verb}_v1({b', '.join(literals(values)).decode()})".replace("%", "%%"))
        return [tuple(None if each is None else str(each) for each in row) for row in rows]

    def attempt(self, claim: Claim, client: str):
        """First record empty buckets as empty: that is the state that most attempts find."""
        nothing = "not exists (select 1 from lh_grant) and not exists (select 1 from lh_queue)"
        self.ask(f"update lh_bucket set sole_token = -token where {nothing}")
        return super().attempt(claim, client)

    def release_token(self, id_hash: str) -> tuple[int, ...]:
        """0 in every fourth release: not every client remembers the token."""
        self.release_count += 1
        known = (
            self.ask("select token from lh_grant where id_hash = %s and state = 2", id_hash)
            if self.release_count % 4
            else []
        )
        return known[0] if known else (0,)

    def sweep(self) -> None:
        self.ask("call look()")

    def take_notifications(self) -> list[Notification]:
        go = self.ask("select client, 'reserved', id_hash, 0, token from lh_grant where state = 1 and client <> ''")
        heads = (
            "select notified_client, 'recheck', notified_id_hash, notified_recheck_at - %s, notified_recheck_at "
            "from lh_queue where notified_client <> ''"
        )
        rows = go + self.ask(heads, micros(self.now))
        before, self.seen_notifications = (
            self.seen_notifications,
            frozenset((notification, id_hash, number) for _, notification, id_hash, _, number in rows),
        )
        new = [
            Notification(client, notification, id_hash, after / 1e6)
            for client, notification, id_hash, after, _ in rows
            if (notification, id_hash, _) not in before
        ]
        woken = {client for (client,) in self.ask("select client from notified")}
        self.ask("delete from notified")
        assert woken == {notification.client for notification in new}  # exactly the clients with new notifications
        return sorted(new)

    def expected_notifications(self, notifications: list[Notification]) -> list[Notification]:
        last = {
            (notification.kind, notification.id_hash): notification
            for notification in notifications
            if notification.kind != "broken"
        }
        return sorted(last.values())


SQL_MODELS: dict[str, type[SqlModel]] = {"postgresql": PostgresqlModel, "mysql": MysqlModel}
