"""What a call costs the PostgreSQL server: query plans, indexes, compilation, sweeps."""

from __future__ import annotations

from leasehold import Client
from leasehold.engines.sql.codec import key
from leasehold.model import Alive, Busy, Claim
from leasehold.runtime.base import run_sync
from tests.support import probe_sql
from tests.support.bare_engine import BareEngineDriver


def count_rows_read(database) -> int:
    """How many rows and index entries the sessions that have ended had read."""
    indexes = "select sum(idx_tup_read) from pg_stat_all_indexes where schemaname = %s"
    tables = "select sum(seq_tup_read) from pg_stat_all_tables where schemaname = %s"
    return sum(database.ask(query, database.schema)[0][0] for query in (indexes, tables))


def test_plan_made_for_an_empty_table_never_scans_sequentially(database, wait_until) -> None:
    seq_scans = "select seq_scan from pg_stat_all_tables where relid = %s::regclass"
    table = f'"{database.schema}".lh_grant'
    with Client(database.named_url("first")) as client:
        client.lock("job").acquire().release()
        database.ask("vacuum analyze {s}.lh_grant")
    wait_until(lambda: not database.sessions("first"))  # the server counts reads when a session ends
    before = database.ask(seq_scans, table)
    with Client(database.named_url("plans")) as client:
        for _ in range(20):
            with client.lock("job", ttl=60) as lease:
                lease.renew()
    wait_until(lambda: not database.sessions("plans"))
    assert database.ask(seq_scans, table) == before


def test_every_index_begins_with_namespace_and_name(database) -> None:
    """While a table is small, the planner may choose any of its indexes."""
    with Client(database.url()) as client:
        client.lock("job").acquire().release()
    query = (
        "select indexdef from pg_indexes where schemaname = %s and tablename in ('lh_grant', 'lh_waiter', 'lh_queue')"
    )
    found = [index for (index,) in database.ask(query, database.schema)]
    assert len(found) == 5
    assert all("(namespace, name" in index for index in found)


def test_sweep_function_is_never_jit_compiled(database) -> None:
    """Its sequential scan is disabled, so the estimated cost is huge, and the server spent 70 ms on JIT compilation."""
    with Client(database.url()) as client:
        client.lock("job").acquire().release()
    query = "select proconfig from pg_proc where proname = 'lh_sweep_v1' and pronamespace = %s::regnamespace"
    ((settings,),) = database.ask(query, f'"{database.schema}"')
    assert "jit=off" in settings


def test_plan_made_for_small_tables_reads_few_rows_when_they_grow(database, make_driver, wait_until) -> None:
    def queue(first: int, last: int) -> None:
        insert_grants(database, first, last, 2**60)
        database.ask(
            "insert into {s}.lh_queue select '', 'held-' || n, mod(n, 1024), 'lock', 1, '', 0, false "
            "from generate_series(%s::bigint, %s) n",
            *(first, last),
        )
        database.ask(
            "insert into {s}.lh_waiter select '', 'held-' || n, false, n, md5('w' || n), '', 'l', 'h', 1, 'p', "
            "'exclusive', 0, 0, %s from generate_series(%s::bigint, %s) n",
            *(2**60, first, last),
        )

    def call_every_verb() -> None:
        held, waiter = driver.acquire(driver.claim()), driver.claim(queue=True)
        driver.attempt(waiter)
        assert isinstance(driver.renew(waiter), Alive)
        assert all(isinstance(each, Alive) for each in run_sync(driver.engine.renew([held] * 9, driver.deadline())))
        driver.release(held)
        driver.release(driver.acquire(waiter))
        broken = driver.acquire(driver.claim())
        assert run_sync(driver.engine.break_("", "job", broken.token, driver.deadline()))
        assert run_sync(probe_sql.connection(driver.engine).call("attempt", sweep_args, driver.deadline()))

    with Client(database.url()) as client:
        client.lock("job").acquire().release()
    queue(1, 1)
    for table in ("grant", "waiter", "queue", "bucket"):
        database.ask(f"alter table {{s}}.lh_{table} set (autovacuum_enabled = off)")  # autovacuum would cause new plans
        database.ask(f"vacuum analyze {{s}}.lh_{table}")
    driver = make_driver(database.named_url("plans", listen="no"))
    probe_sql.use_attempt_number(driver.engine, 1)  # not at random: far from a sweep of the queues
    sweep_args = (*key(driver.claim("sweep")), "", "l", "h", 1, "p", "exclusive", "lock", 1, 1, 0, 0, False, 8, 5000)
    call_every_verb()
    queue(2, 2000)
    before = count_rows_read(database)
    for _ in range(5):
        call_every_verb()
    run_sync(driver.engine.close())
    wait_until(lambda: not database.sessions("plans"))  # the server counts reads when a session ends
    assert count_rows_read(database) - before < 5 * 4_500, (
        "only a sweep may read every queue and check that it has a waiter"
    )


def test_long_queue_is_not_read_by_plans_made_while_it_was_shorter(database, make_driver, wait_until) -> None:
    """Each claim of a reservation read the whole queue, and so did a heartbeat, or could."""

    def insert_waiters(first: int, last: int) -> None:
        database.ask(
            "insert into {s}.lh_waiter select '', 'job', false, 1000000 + n, md5(n::text) || md5('w' || n), '', 'l', "
            "'h', 1, 'p', 'exclusive', 0, 0, %s from generate_series(%s::bigint, %s) n",
            *(2**60, first, last),
        )

    def hand_off(driver: BareEngineDriver, holder: Claim) -> Claim:
        """To a waiter that comes before those that were inserted."""
        waiter = driver.claim(queue=True)
        assert isinstance(driver.attempt(waiter), Busy)
        assert isinstance(driver.renew(waiter), Alive)
        driver.release(holder)
        return driver.acquire(waiter)

    drivers = [make_driver(database.named_url("plans", listen="no")) for _ in range(4)]
    holder, waiting = drivers[0].acquire(drivers[0].claim(ttl=600.0)), 0
    database.ask("alter table {s}.lh_waiter set (autovacuum_enabled = off)")  # autovacuum would cause new plans
    for driver, waiters in zip(drivers, (1, 100, 400, 1000), strict=True):
        insert_waiters(waiting + 1, waiters)
        waiting = waiters
        for _ in range(8):  # from the sixth call on, a session keeps its plan
            holder = hand_off(driver, holder)
    insert_waiters(waiting + 1, 6000)
    before = count_rows_read(database)
    for driver in drivers:
        for _ in range(10):
            holder = hand_off(driver, holder)
        run_sync(driver.engine.close())
    wait_until(lambda: not database.sessions("plans"))  # the server counts reads when a session ends
    assert count_rows_read(database) - before < 40 * 1_000 + 32 * 1_000 + 40 * 500, (
        "only who joins may read a thousand waiters, to count them"
    )


def test_usual_hand_off_needs_no_general_decision(database, make_driver) -> None:
    """`hand_off.sql` decides it in a third of the statements."""
    driver = make_driver(database.url())
    probe_sql.use_attempt_number(driver.engine, 1)  # not at random: far from a sweep
    holder, *queue = driver.acquire(driver.claim()), *(driver.claim(queue=True) for _ in range(3))
    for waiter in queue:
        assert isinstance(driver.attempt(waiter), Busy)
    for function in ("lh_contend_v1", "lh_advance_v1"):
        database.ask(f"alter function {{s}}.{function} rename to {function}_unused")
    for _ in range(4):
        driver.release(holder)
        holder = driver.acquire(queue.pop(0))
        queue.append(driver.claim(queue=True))
        assert driver.attempt(queue[-1]).position == 2
    query = "select proname from pg_proc where proname ~ 'contend_v1$|advance_v1$' and pronamespace = %s::regnamespace"
    assert not database.ask(query, f'"{database.schema}"'), "a call missed one, and the client created them again"


def insert_grants(database, first: int, last: int, expires_at: int) -> None:
    """Insert a grant for each name `held-N`, without a client."""
    database.ask(
        "insert into {s}.lh_grant select '', 'held-' || n, n, mod(n, 1024), md5(n::text), 2, '', 'l', 'h', 1, 'p', "
        "'exclusive', 'lock', 1, null, 0, 0, 0, 0, %s, false, 0 from generate_series(%s::bigint, %s) n",
        *(expires_at, first, last),
    )


def test_expired_grants_among_thousands_are_swept(database) -> None:
    with Client(database.url()) as client:
        client.lock("job").acquire().release()
        database.ask(
            "insert into {s}.lh_bucket select '', n, 0, 0 from generate_series(0, 1023) n on conflict do nothing"
        )
        for start in range(0, 3000, 300):  # 3 of every 300 have expired, all over the table
            insert_grants(database, start + 1, start + 3, 1)
            insert_grants(database, start + 4, start + 300, 2**60)
        lock = client.lock("job")
        for _ in range(400):
            with lock:
                pass
    assert database.ask("select count(*) from {s}.lh_grant") == [(2970,)]


def test_rows_locked_by_a_transaction_do_not_stop_the_sweep(database) -> None:
    with Client(database.url()) as client, database.server.connect() as session, session.transaction():
        lock = client.lock("job")
        with lock:
            pass
        database.ask(
            "insert into {s}.lh_bucket select '', n, 0, 0 from generate_series(1, 32) n on conflict do nothing"
        )
        insert_grants(database, 1, 32, 1)
        session.execute(f'select 1 from "{database.schema}".lh_grant where token <= 8 for key share')
        for _ in range(800):
            with lock:
                pass
        assert database.ask("select count(*) from {s}.lh_grant") == [(8,)]
