"""One name kept in two ways: by the pure line of core/admission.py, and by the procedures of a server.

The procedures are the real ones, in a schema of their own in which a few have been replaced: the clock, the proof of
life, and the telling. Tokens are compared by what they stand for: both rise, by different steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from leasehold.core.admission import Line, described
from leasehold.core.party import Counter, Moment, Word
from leasehold.core.timing import BEAT
from leasehold.engines.mysql import schema as mysql_schema
from leasehold.engines.mysql.wire import literals
from leasehold.engines.postgresql import schema as postgresql_schema
from leasehold.engines.sql.rows import holdings, micros, seconds
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing import mysql_rig, postgresql_rig

PG_FAKES = """
create table model.world (now bigint not null);
insert into model.world values (0);
create table model.deaf (client text primary key);
create table model.told (nr serial, client text, word text, mark text, after bigint);
create or replace function model.lh_now_v1() returns bigint language sql volatile as 'select now from model.world';
create or replace function model.lh_reachable_v1(_client text) returns boolean language sql volatile as
    'select not exists (select 1 from model.deaf where client = _client)';
create or replace function model.lh_tell_v1(
    _client text, _word text, _mark text, _after bigint, _namespace text, _name text
) returns void language sql volatile as
    'insert into model.told (client, word, mark, after) values (_client, _word, _mark, _after)';
create or replace function model.lh_prepare_v1(_patience integer) returns text language sql as 'select null::text';
create function model.look() returns void language plpgsql as $$
begin
    perform model.lh_look_v1('ns', 5, 'name', model.lh_enter_v1('ns', 5, 1000));
end $$;
"""

CLOCK = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
MY_FAKES = """
create table world (now bigint not null);
insert into world values (0);
create table deaf (client varbinary(64) primary key);
create table told (client varbinary(64));
delimiter $$
create or replace procedure lh_reachable_v1(_client varbinary(64), out _reachable boolean)
begin
    set _reachable = not exists (select 1 from deaf where client = _client);
end
$$
create or replace procedure lh_tell_v1(_client varbinary(64))
begin
    insert into told values (_client);
end
$$
create procedure look()
begin
    declare _t, _last bigint;
    call lh_begin_v1(1000);
    call lh_enter_v1('ns', 5, _t, _last);
    call lh_look_v1('ns', 5, 'name', _t);
    commit;
end
$$
delimiter ;
"""


@dataclass
class World:
    """One clock, one set of clients that can be told. Subclasses call a server's procedures."""

    db: Any
    now: float = 1000.0
    deaf: set[str] = field(default_factory=set)
    counter: Counter = field(default_factory=Counter)
    line: Line | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # the server's -> the model's

    tables = ("lh_grant", "lh_waiter", "lh_line", "lh_bucket", "deaf", "told")

    def __post_init__(self) -> None:
        for table in self.tables:
            self.ask(f"delete from {table}")
        self.pass_time(0.0)

    @classmethod
    def opened(cls) -> Iterator[Any]:
        """A session with the schema made, and gone at the end. Raises `Absent`."""
        raise NotImplementedError

    def ask(self, query, *values):
        raise NotImplementedError

    def call(self, verb: str, *values) -> list[tuple]:
        """A verb as the engine calls it: rows as text."""
        raise NotImplementedError

    def look(self) -> None:
        raise NotImplementedError

    def words(self) -> list[Word]:
        """What the server has said since it was last asked."""
        raise NotImplementedError

    def spoken(self, words: list[Word]) -> list[Word]:
        """What of the pure line's words a server says, in the order in which it would."""
        return words

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ask("update world set now = %s", micros(self.now))

    def hears(self, client: str, hears: bool) -> None:
        (self.deaf.discard if hears else self.deaf.add)(client)
        self.ask("delete from deaf where client = %s", client)
        if not hears:
            self.ask("insert into deaf values (%s)", client)

    def pure(self, verb, kind="lock", limit=1):
        at = Moment(self.now, lambda: self.counter.next(0), lambda client: client not in self.deaf)
        line = self.line or Line(self.now, kind, limit)
        line.occupiers = dict(sorted(line.occupiers.items()))  # of two that end together, rows show the older
        line._scan_at = self.now  # on the server a lapsed place counts for nothing, whoever asks
        try:
            answer, words = verb(line, at)
        except Mismatch as error:
            return str(error), []
        self.line = None if line.idle else line
        return answer, words

    def known(self, token):
        """The model's token for one of the server's; a new one must be above all before."""
        if token not in self.tokens:
            assert token > max(self.tokens, default=0), "a token that does not rise (E3)"
            self.tokens[token] = max(self.tokens.values(), default=0) + 1
        return self.tokens[token]

    def learn(self) -> None:
        for (token,) in self.ask("select token from lh_grant order by token"):
            self.known(token)

    # -------------------------------------------------------- the server's verbs

    def attempt(self, claim: Claim, client: str):
        values = ("ns", 5, "name", claim.mark, client, *claim.holder, claim.mode, claim.kind, claim.limit)
        more = (micros(claim.ttl), micros(claim.delay), claim.queue, 8, 1000)
        ((answer, token, life, slot, *busy),) = self.call("attempt", *values, *more)
        self.learn()
        if answer != "1":
            place, *holder, kind, most = busy
        if answer == "2":
            found, wanted = described(kind, int(most)), described(claim.kind, claim.limit)
            return str(Mismatch("name", wanted=wanted, found=found))
        token = None if token is None else self.known(int(token))
        if answer == "1":
            return Grant(token, seconds(life), None if slot is None else int(slot))
        label, host, pid, purpose = holder
        return Busy(
            None if life is None else seconds(life),
            None if place is None else int(place),
            token,
            None if label is None else Holder(label, host, int(pid), purpose),
        )

    def renew(self, claim: Claim):
        if not claim.token:
            ((_, known, _),) = self.call("beat", ["ns"], [5], ["name"], [claim.mark], 1000)
            return Alive(BEAT) if known == "t" else Gone()
        columns = (["ns"], ["name"], [claim.mark], [self.real(claim.token)], [micros(claim.ttl)])
        ((_, life, lapsed),) = self.call("renew", *columns, 1000)
        return Alive(seconds(life)) if life is not None else Gone("lapsed" if lapsed == "t" else "unknown")

    def real(self, token: int) -> int:
        return next((theirs for theirs, mine in self.tokens.items() if mine == token), 7)

    def release(self, mark: str, min_hold: float, held: bool):
        rows = self.call("release", "ns", 5, "name", mark, micros(min_hold), held, 1000, *self.token_of(mark))
        return rows in ([], [("t",)])

    def token_of(self, mark: str) -> tuple[int, ...]:
        """What a release is told beside, where it is."""
        return ()

    def break_(self, token: int):
        return self.call("break", "ns", 5, "name", self.real(token), 1000) == [("t",)]

    def shown(self) -> None:
        """What a look at the name shows, the same from both, nothing changed."""
        self.learn()
        found = holdings("ns", self.call("inspect", "ns", "name", True))
        line = deepcopy(self.line) or Line(self.now)
        line.tidy(self.now)
        expected = list(line.holdings("ns", "name", self.now))
        theirs = [replace(each, token=each.token and self.tokens[each.token]) for each in found]
        assert [rounded(each) for each in theirs] == [rounded(each) for each in expected]

    def size(self) -> int:
        tables = ("lh_grant", "lh_waiter", "lh_line")
        return sum(self.ask(f"select count(*) from {table}")[0][0] for table in tables)


def rounded(holding):
    """Marks have one letter here, which is their beginning and their end: the server shows both."""
    times = {"age": round(holding.age, 5), "left": round(holding.left, 5)}
    return replace(holding, **times, fingerprint=holding.fingerprint[:1], owner=holding.owner[:1])


class PostgresqlWorld(World):
    @classmethod
    def opened(cls) -> Iterator[Any]:
        with postgresql_rig.server().connect() as session:
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
        if verb == "attempt":  # JSON, which psycopg has read
            rows = [reply for (reply,) in rows]
        return [
            tuple(None if v is None else str(v)[0].lower() if isinstance(v, bool) else str(v) for v in row)
            for row in rows
        ]

    def look(self) -> None:
        self.ask("select look()")

    def words(self) -> list[Word]:
        told = self.ask("delete from told returning nr, client, word, mark, after")
        return [Word(client, word, mark, after / 1e6) for _, client, word, mark, after in sorted(told)]


class MysqlWorld(World):
    """There a word is a state of the tables that its client has not seen yet; and a break is not told."""

    seen: frozenset[tuple] = frozenset()
    releases: int = 0

    @classmethod
    def opened(cls) -> Iterator[Any]:
        with mysql_rig.server().connect() as session, session.cursor() as cursor:
            cursor.execute("drop database if exists model")
            script = mysql_schema.text("model").replace(CLOCK, "(select now from world)") + MY_FAKES
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
        """A bucket that is known to have nothing in it is what most attempts meet."""
        nothing = "not exists (select 1 from lh_grant) and not exists (select 1 from lh_line)"
        self.ask(f"update lh_bucket set alone = -token where {nothing}")
        return super().attempt(claim, client)

    def token_of(self, mark: str) -> tuple[int, ...]:
        """Not every client remembers it."""
        self.releases += 1
        known = self.ask("select token from lh_grant where mark = %s and state = 2", mark) if self.releases % 4 else []
        return known[0] if known else (0,)

    def look(self) -> None:
        self.ask("call look()")

    def words(self) -> list[Word]:
        go = self.ask("select client, 'go', mark, 0, token from lh_grant where state = 1 and client <> ''")
        heads = "select told_client, 'head', told, told_end - %s, told_end from lh_line where told_client <> ''"
        rows = go + self.ask(heads, micros(self.now))
        before, self.seen = self.seen, frozenset((word, mark, number) for _, word, mark, _, number in rows)
        new = [
            Word(client, word, mark, after / 1e6)
            for client, word, mark, after, _ in rows
            if (word, mark, _) not in before
        ]
        woken = {client for (client,) in self.ask("select client from told")}
        self.ask("delete from told")
        assert woken == {word.client for word in new}  # whoever has news is woken, and nobody else
        return sorted(new)

    def spoken(self, words: list[Word]) -> list[Word]:
        last = {(word.kind, word.mark): word for word in words if word.kind != "lost"}
        return sorted(last.values())


WORLDS: dict[str, type[World]] = {"postgresql": PostgresqlWorld, "mysql": MysqlWorld}
