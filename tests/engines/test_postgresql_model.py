"""The state machine in PL/pgSQL beside the pure one: the same verbs at the same times give the same answers and words.

The functions are the real ones, in a schema of their own in which four have been replaced: the clock, the proof of
life, the telling, and the settings (nothing here needs the disk). Tokens are compared by what they stand for: both
rise, by different steps.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasehold.core.admission import Line
from leasehold.core.party import Counter, Moment, Word
from leasehold.core.timing import BEAT
from leasehold.engines.postgresql import schema
from leasehold.engines.sql.rows import holdings, micros, seconds
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing.postgresql_rig import server
from leasehold.testing.suite import Absent

MARKS = "abcdefgh"
SCHEMA = "model"

FAKES = """
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


@pytest.fixture(scope="module")
def db():
    try:
        running = server()
    except Absent as absent:
        pytest.skip(str(absent))
    with running.connect() as session:
        session.execute("drop schema if exists model cascade")
        session.execute((schema.text(SCHEMA) + FAKES).encode())
        session.execute("set synchronous_commit = off")
        session.execute("set search_path = model")
        yield session
        session.execute("drop schema model cascade")


@dataclass
class World:
    """One clock, one set of clients that can be told, and the same name kept in two ways."""

    db: object
    now: float = 1000.0
    deaf: set[str] = field(default_factory=set)
    counter: Counter = field(default_factory=Counter)
    line: Line | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # the server's -> the model's

    def __post_init__(self) -> None:
        self.ask("truncate lh_grant, lh_waiter, lh_line, lh_bucket, deaf, told")
        self.ask("update world set now = %s", micros(self.now))

    def ask(self, query, *values):
        cursor = self.db.execute(query, values)
        return cursor.fetchall() if cursor.description else []

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ask("update world set now = %s", micros(self.now))

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

    def words(self):
        told = self.ask("delete from told returning nr, client, word, mark, after")
        return [Word(client, word, mark, after / 1e6) for _, client, word, mark, after in sorted(told)]

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
        more = (micros(claim.ttl), micros(claim.delay), claim.queue, 2, 1000)
        ((answer, token, life, slot, place, *holder, kind, most),) = self.ask(
            f"select * from lh_attempt_v1({', '.join(['%s'] * 17)})", *values, *more
        )
        self.learn()
        if answer == 2:
            found, wanted = (described(*pair) for pair in ((kind, most), (claim.kind, claim.limit)))
            return str(Mismatch("name", wanted=wanted, found=found))
        if answer == 1:
            return Grant(self.known(token), seconds(life), slot)
        return Busy(
            None if life is None else seconds(life),
            place,
            None if token is None else self.known(token),
            None if holder[0] is None else Holder(*holder),
        )

    def renew(self, claim: Claim):
        if not claim.token:
            ((_, known, _),) = self.ask(
                "select * from lh_beat_v1(%s, %s, %s, %s, 1000)", ["ns"], [5], ["name"], [claim.mark]
            )
            return Alive(BEAT) if known else Gone()
        real = next((theirs for theirs, mine in self.tokens.items() if mine == claim.token), 7)
        columns = (["ns"], ["name"], [claim.mark], [real], [micros(claim.ttl)])
        ((_, life, lapsed),) = self.ask("select * from lh_renew_v1(%s, %s, %s, %s, %s, 1000)", *columns)
        return Alive(seconds(life)) if life is not None else Gone("lapsed" if lapsed else "unknown")

    def release(self, mark: str, min_hold: float, held: bool):
        values = (mark, micros(min_hold), held)
        return self.ask("select lh_release_v1('ns', 5, 'name', %s, %s, %s, 1000)", *values)[0][0]

    def break_(self, token: int):
        real = next((theirs for theirs, mine in self.tokens.items() if mine == token), 7)
        return self.ask("select lh_break_v1('ns', 5, 'name', %s, 1000)", real)[0][0]

    def shown(self) -> None:
        """What a look at the name shows, the same from both, nothing changed."""
        self.learn()
        found = holdings("ns", self.ask("select * from lh_inspect_v1('ns', 'name', true)"))
        line = deepcopy(self.line) or Line(self.now)
        line.tidy(self.now)
        expected = list(line.holdings("ns", "name", self.now))
        theirs = [replace(each, token=each.token and self.tokens[each.token]) for each in found]
        assert [rounded(each) for each in theirs] == [rounded(each) for each in expected]

    def size(self) -> int:
        tables = ("lh_grant", "lh_waiter", "lh_line")
        return sum(self.ask(f"select count(*) from {table}")[0][0] for table in tables)


def described(kind: str, most: int) -> str:
    return "lock" if kind == "lock" else f"semaphore of {most}"


def rounded(holding):
    """Marks have one letter here, which is their beginning and their end: the server shows both."""
    times = {"age": round(holding.age, 5), "left": round(holding.left, 5)}
    return replace(holding, **times, fingerprint=holding.fingerprint[:1], owner=holding.owner[:1])


def near(answer):
    """Without what floating seconds and whole microseconds make of the same time, and without a place in a renewal."""
    if isinstance(answer, Busy):
        return answer._replace(left=None if answer.left is None else round(answer.left, 5))
    if isinstance(answer, Grant):
        return answer._replace(ttl=round(answer.ttl, 5))
    if isinstance(answer, Alive):
        return Alive(round(answer.ttl, 5))
    return answer


def claim(mark: str, **more) -> Claim:
    more = {"ttl": 10.0, "queue": True} | more
    return Claim("ns", "name", f"secret {mark}", mark, Holder(f"holder {mark}", "h", 1, "p"), **more)


marks = st.sampled_from(MARKS)
shapes = st.sampled_from([{}, {}, {"mode": "shared"}, {"delay": 2.0}])
semaphores = st.sampled_from([{"kind": "semaphore", "limit": 2, "mode": "exclusive"}])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), marks, st.booleans(), shapes, st.sampled_from([1.0, 10.0])),
        st.tuples(st.just("attempt"), marks, st.just(True), shapes, st.just(10.0)),
        st.tuples(st.just("renew"), marks, st.booleans()),
        st.tuples(st.just("release"), marks, st.sampled_from([0.0, 4.0]), st.booleans()),
        st.tuples(st.just("break"), marks),
        st.tuples(st.just("look")),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 3.0, 5.0, 16.0])),
        st.tuples(st.just("deaf"), marks),
        st.tuples(st.just("hears"), marks),
    ),
    max_size=40,
)


def take(mark: str, queue: bool = True, ttl: float = 10.0, **shape) -> tuple:
    return ("attempt", mark, queue, shape, ttl)


LINE = (take("a"), take("b"), take("c"))
HISTORIES = {
    "a turn nobody takes lapses, and its owner comes back": (
        *(*LINE, ("release", "a", 0.0, True), ("pass", 3.0), take("c"), take("b"), ("release", "c", 0.0, True)),
        *(take("b"), ("pass", 5.0), take("c")),
    ),
    "the head is told again when its time comes sooner": (
        *(take("a", mode="shared"), take("b", mode="shared", ttl=1.0), take("c"), ("renew", "b", True)),
        *(("pass", 0.5), take("d", queue=False, mode="shared"), ("release", "a", 0.0, True), ("pass", 3.0), ("look",)),
    ),
    "the next in line looks whether somebody given a turn is there": (
        *(*LINE, ("release", "a", 0.0, True), ("deaf", "b"), ("pass", 0.5), take("c"), ("hears", "b"), take("b")),
    ),
    "a longer hold after a shorter one": (
        *(take("a", ttl=1.0), take("b"), take("a", ttl=10.0), ("pass", 0.5), take("c"), ("pass", 0.5), ("look",)),
    ),
    "a delay, a break, and a break once more": (
        *(take("a", delay=2.0), take("b"), ("break", "a"), ("pass", 0.5), ("break", "a"), take("b"), ("pass", 3.0)),
        *(("look",), take("b")),
    ),
    "an early release cools": (take("a"), take("b"), ("release", "a", 4.0, True), take("b"), ("pass", 5.0), take("b")),
    "a stray release ends no grant, but a turn": (
        *(*LINE, ("release", "a", 0.0, False), ("release", "a", 0.0, True), ("release", "b", 0.0, False), take("c")),
    ),
    "waiters not heard of are dropped": (
        *LINE,
        ("pass", 5.0),
        ("renew", "c", False),
        ("pass", 16.0),
        take("c"),
        take("b"),
    ),
    "readers go together, a writer alone": (
        *(take("a"), take("b", mode="shared"), take("c", mode="shared"), take("d"), take("e", mode="shared")),
        *(("release", "a", 0.0, True), take("b", mode="shared"), take("c", mode="shared"), take("e", mode="shared")),
        *(("release", "b", 0.0, True), ("release", "c", 0.0, True), take("d")),
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_server_and_the_pure_line_agree_on(db, name: str) -> None:
    follow(World(db), HISTORIES[name], "lock", None)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_server_and_the_pure_line_agree(db, kind: str, data) -> None:
    run(db, kind, data)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_server_and_the_pure_line_agree_at_length(db, kind: str, data) -> None:
    run(db, kind, data)


def run(db, kind: str, data) -> None:
    follow(World(db), data.draw(steps), kind, data)


def follow(world: World, history, kind: str, data) -> None:
    tokens: dict[str, int] = {}
    for step in history:
        both(world, step, tokens, kind, data)
        world.shown()
    # Nobody asks any more: a look long after finds nothing, and leaves nothing.
    world.pass_time(1000.0)
    world.ask("select look()")
    assert world.size() == 0


def both(world: World, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        world.pass_time(args[0])
    elif what == "deaf":
        world.deaf.add(f"client {args[0]}")
        world.ask("insert into deaf values (%s) on conflict do nothing", f"client {args[0]}")
    elif what == "hears":
        world.deaf.discard(f"client {args[0]}")
        world.ask("delete from deaf where client = %s", f"client {args[0]}")
    elif what == "look":
        agree(world, world.ask("select look()") and None, lambda line, at: (None, line.look(at)))
    elif what == "attempt":
        mark, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        one, client = claim(mark, queue=queue, ttl=ttl, **shape), f"client {mark}"
        answer = world.attempt(one, client)
        agree(world, answer, lambda line, at: line.attempt(at, one, client), one.kind, one.limit)
        if isinstance(answer, Grant):
            tokens[mark] = answer.token
    elif what == "renew":
        mark, held = args
        one = claim(mark, token=tokens.get(mark, 7) if held else 0)
        answer = world.renew(one)
        world.ask("select look()")  # a renewal there touches nothing else
        agree(world, answer, lambda line, at: renewed(line, at, one))
    elif what == "release":
        mark, least, held = args
        agree(world, world.release(mark, least, held), lambda line, at: line.release(at, mark, least, held))
    else:
        token = tokens.get(args[0], 7)
        agree(world, world.break_(token), lambda line, at: line.break_(at, token))


def renewed(line: Line, at: Moment, one: Claim):
    reply, words = line.renew(at, one)
    if isinstance(reply, Gone) and not one.token:  # of a place in line nobody asks why it is gone
        reply = Gone()
    return reply, words


def agree(world: World, answer, verb, kind="lock", limit=1) -> None:
    expected, words = world.pure(verb, kind, limit)
    world.learn()
    assert near(answer) == near(expected)
    assert [near_word(word) for word in world.words()] == [near_word(word) for word in words]


def near_word(word: Word) -> Word:
    return word._replace(seconds=round(word.seconds, 5))
