-- The state machine of core/lock_state.py in PL/pgSQL: the grants and the queue of one name. Only the verbs call these
-- functions (attempt.sql, verbs.sql), with the row of the name's bucket locked, and pass the time.
--
--   waiting ──> reserved ──> held ──> (released)
--      ^            │          └────> cooling ──> (over)
--      └─ passed ───┘ not claimed in time, or its client cannot be notified
--
-- States: 0 waiting, 1 reserved, 2 held, 3 cooling, 4 passed over. Times and durations are in microseconds.
--
-- A transaction of the application that called lh_check_v1 may have locked a grant's row. Nothing here waits for such a
-- row while it has the bucket locked: a grant that cannot be removed keeps occupying the name, and is checked again a
-- little later (100000 us).

create or replace function "leasehold".lh_now_v1() returns bigint
language sql volatile as $lh$
    -- now() is when the transaction began; extract() computes in numeric, which costs 1.5 us each time
    select (date_part('epoch', clock_timestamp()) * 1000000)::bigint
$lh$;

-- Whether a client can be notified. Its listening session holds an exclusive advisory lock on its address: if a shared
-- one can be taken, the session is gone. A client without an address counts as reachable, because it polls. The lock's
-- number is a hash of the address: every role can read pg_locks, but none may listen at the client's channel or forge
-- notifications on it.
create or replace function "leasehold".lh_reachable_v1(_client text) returns boolean
language sql volatile as $lh$
    select case when _client = '' then true
        else not pg_try_advisory_xact_lock_shared(
            ('x' || left(encode(sha256(convert_to(_client, 'UTF8')), 'hex'), 16))::bit(64)::bigint) end
$lh$;

-- Notify a client. The server delivers it when the transaction commits, never before.
create or replace function "leasehold".lh_notify_v1(
    _client text, _notification text, _id_hash text, _after bigint, _namespace text, _name text
) returns void
language plpgsql as $lh$
begin
    if _client <> '' then
        perform pg_notify('lh_' || _client, json_build_array(_notification, _id_hash, _after, _namespace, _name)::text);
    end if;
end
$lh$;

create or replace function "leasehold".lh_refuse_v1() returns text
language plpgsql as $lh$
begin
    raise exception 'leasehold needs read committed' using errcode = 'LH001';
end
$lh$;

-- The settings that every verb that writes needs in its transaction, whatever the session, the role or a pooler has
-- set. It is a single expression, so that PostgreSQL can inline the call. Not _durable: the client does not want to wait
-- for the disk (durable=no in its URL). A crash loses only the last commits, and none that came before a durable one.
create or replace function "leasehold".lh_prepare_v1(_lock_timeout_ms integer, _durable boolean) returns text
language sql volatile as $lh$
    select concat(
        -- Each statement must see what was committed before it: an older snapshot would show an outdated queue.
        case when current_setting('transaction_isolation') = 'read committed'
            then set_config('lock_timeout', _lock_timeout_ms::text, true) else "leasehold".lh_refuse_v1() end,
        case when not _durable then set_config('synchronous_commit', 'off', true)
            when current_setting('synchronous_commit') in ('off', 'local')
            then set_config('synchronous_commit', 'on', true) end,  -- a confirmed grant must survive a crash
        case when current_setting('client_min_messages') = 'error'  -- a warning says that no standby has the commit
            then set_config('client_min_messages', 'warning', true) end)
$lh$;

-- Lock the bucket, and only then read the clock: so decisions and their times have one order (E1, E3).
create or replace function "leasehold".lh_lock_bucket_v1(
    _namespace text, _bucket integer, _lock_timeout_ms integer, _durable boolean
) returns bigint
language plpgsql as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(_lock_timeout_ms, _durable);
begin
    loop
        perform 1 from "leasehold".lh_bucket where namespace = _namespace and bucket = _bucket for update;
        exit when found;
        insert into "leasehold".lh_bucket values (_namespace, _bucket, 0, 0) on conflict do nothing;
    end loop;
    return "leasehold".lh_now_v1();
end
$lh$;

-- From here on, until the bucket is unlocked, no other transaction ends a grant of this name. The holder of a grant
-- that is not contended may release it without locking the bucket (`lh_release_v1`). If such a release is under way,
-- the update waits for it. That wait is short: the release waits at most 100 ms for any lock, and never for a bucket
-- while it has the row locked. Later statements then see its result. A name has at most one such grant, its first. This
-- runs before any other row of the name is locked, so that there is no deadlock.
create or replace function "leasehold".lh_set_contended_v1(_namespace text, _name text) returns void
language plpgsql as $lh$
begin
    update "leasehold".lh_grant set contended = true where namespace = _namespace and name = _name and not contended;
end
$lh$;

-- Pass over a waiter that did not claim its reservation: it keeps its ticket, and returns at its old position when it
-- attempts again.
create or replace function "leasehold".lh_pass_over_v1(_grant "leasehold".lh_grant) returns void
language plpgsql as $lh$
begin
    delete from "leasehold".lh_grant where namespace = _grant.namespace and name = _grant.name and token = _grant.token;
    insert into "leasehold".lh_queue values (
            _grant.namespace, _grant.name, _grant.bucket, _grant.kind, _grant.grant_limit, '', 0, false)
        on conflict do nothing;
    insert into "leasehold".lh_waiter values (
        _grant.namespace, _grant.name, true, _grant.ticket, _grant.id_hash, _grant.client, _grant.label, _grant.host,
        _grant.pid, _grant.purpose, _grant.mode, _grant.delay, _grant.since, _grant.heartbeat_expires_at);
end
$lh$;

-- End every grant, reservation and cooling time that is over by now. Runs before every decision (E1).
create or replace function "leasehold".lh_expire_grants_v1(_namespace text, _name text, _now bigint) returns void
language plpgsql as $lh$
declare
    _grant "leasehold".lh_grant;
begin
    for _grant in
        select * from "leasehold".lh_grant
        where namespace = _namespace and name = _name and until <= _now
        order by token for update skip locked
    loop
        if _grant.state = 2 and _grant.until + _grant.delay > _now then
            update "leasehold".lh_grant set state = 3, until = _grant.until + _grant.delay
                where namespace = _namespace and name = _name and token = _grant.token;
        elsif _grant.state = 1 and _grant.heartbeat_expires_at > _now then
            perform "leasehold".lh_pass_over_v1(_grant);
        else
            delete from "leasehold".lh_grant where namespace = _namespace and name = _name and token = _grant.token;
        end if;
    end loop;
end
$lh$;

-- Whether the name admits one more claim of this mode.
create or replace function "leasehold".lh_can_admit_v1(_namespace text, _name text, _mode text) returns boolean
language plpgsql as $lh$
declare
    _count integer;
    _kind text;
    _grant_limit integer;
    _exclusive boolean;
begin
    select count(*), max(kind), bool_or(mode = 'exclusive'), coalesce(
            (select grant_limit from "leasehold".lh_queue where namespace = _namespace and name = _name),
            max(grant_limit))
        into _count, _kind, _exclusive, _grant_limit
        from "leasehold".lh_grant where namespace = _namespace and name = _name;
    return _count = 0
        or (_kind = 'semaphore' and _count < _grant_limit)
        or (_kind = 'lock' and _mode = 'shared' and not _exclusive);
end
$lh$;

-- The lowest free slot. One of the first count + 1 is free.
create or replace function "leasehold".lh_free_slot_v1(_namespace text, _name text) returns integer
language plpgsql as $lh$
declare
    _count integer;
begin
    select count(*) into _count from "leasehold".lh_grant where namespace = _namespace and name = _name;
    return (
        select candidate from generate_series(0, _count) candidate
        where not exists (
            select 1 from "leasehold".lh_grant where namespace = _namespace and name = _name and slot = candidate)
        order by candidate limit 1);
end
$lh$;

-- Reserve for the head of the queue while the name admits it; then notify the new head of when to re-check.
-- _caller_id_hash: the claim that attempts. Its own reply informs it, and it is alive, because it has just called.
create or replace function "leasehold".lh_advance_v1(
    _namespace text, _bucket integer, _name text, _now bigint, _caller_id_hash text
) returns void
language plpgsql as $lh$
declare
    _queue_row "leasehold".lh_queue;
    _head "leasehold".lh_waiter;
    _grant "leasehold".lh_grant;
    _token bigint;
    _end bigint;
    _recheck_at bigint;
    _reserved boolean;
    _passed_over boolean;
begin
    select * into _queue_row from "leasehold".lh_queue where namespace = _namespace and name = _name;
    if not found then
        return;
    end if;
    loop
        select * into _head from "leasehold".lh_waiter
            where namespace = _namespace and name = _name and not passed order by ticket limit 1;
        exit when not found;
        if _head.id_hash <> _caller_id_hash then
            if _head.heartbeat_expires_at <= _now then
                delete from "leasehold".lh_waiter
                    where namespace = _namespace and name = _name and id_hash = _head.id_hash;
                continue;
            elsif not "leasehold".lh_reachable_v1(_head.client) then
                update "leasehold".lh_waiter set passed = true
                    where namespace = _namespace and name = _name and id_hash = _head.id_hash;
                continue;
            end if;
        end if;
        if "leasehold".lh_can_admit_v1(_namespace, _name, _head.mode) then
            update "leasehold".lh_bucket set token = greatest(token + 1, _now)
                where namespace = _namespace and bucket = _bucket returning token into _token;
            delete from "leasehold".lh_waiter
                where namespace = _namespace and name = _name and id_hash = _head.id_hash;
            insert into "leasehold".lh_grant values (
                _namespace, _name, _token, _bucket, _head.id_hash, 1, _head.client, _head.label, _head.host, _head.pid,
                _head.purpose, _head.mode, _queue_row.kind, _queue_row.grant_limit,
                case _queue_row.kind when 'semaphore' then "leasehold".lh_free_slot_v1(_namespace, _name) end,
                _head.delay, _head.ticket, _now, _head.heartbeat_expires_at, _now + 3000000, true, 0);
            if _head.id_hash <> _caller_id_hash then
                perform "leasehold".lh_notify_v1(_head.client, 'reserved', _head.id_hash, 0, _namespace, _name);
            end if;
            continue;
        end if;
        _passed_over := false;  -- a client that died after its reservation will not claim it
        for _grant in
            select * from "leasehold".lh_grant
            where namespace = _namespace and name = _name and state = 1 and id_hash <> _caller_id_hash order by token
        loop
            if not "leasehold".lh_reachable_v1(_grant.client) then
                perform "leasehold".lh_pass_over_v1(_grant);
                _passed_over := true;
            end if;
        end loop;
        continue when _passed_over;
        select min(case when until > _now then until else _now + 100000 end), bool_or(state = 1) into _end, _reserved
            from "leasehold".lh_grant where namespace = _namespace and name = _name;
        _recheck_at := case when _reserved then least(_end, _now + 1000000) else _end end;
        if _head.id_hash = _caller_id_hash then
            update "leasehold".lh_queue set notified_id_hash = _head.id_hash, notified_recheck_at = _recheck_at
                where namespace = _namespace and name = _name
                    and (notified_id_hash <> _head.id_hash or notified_recheck_at <> _recheck_at);
        elsif _queue_row.notified_id_hash <> _head.id_hash or _recheck_at < _queue_row.notified_recheck_at then
            perform "leasehold".lh_notify_v1(
                _head.client, 'recheck', _head.id_hash, _recheck_at - _now, _namespace, _name);
            update "leasehold".lh_queue set notified_id_hash = _head.id_hash, notified_recheck_at = _recheck_at
                where namespace = _namespace and name = _name;
        end if;
        return;
    end loop;
    -- No claim waits. Remove passed-over ones whose heartbeat has expired, and with the last of them the queue.
    delete from "leasehold".lh_waiter
        where namespace = _namespace and name = _name and passed and heartbeat_expires_at <= _now;
    delete from "leasehold".lh_queue l where namespace = _namespace and name = _name and not limit_set
        and not exists (select 1 from "leasehold".lh_waiter where namespace = _namespace and name = _name)
        and not exists (  -- then the limit of the grants does not count
            select 1 from "leasehold".lh_grant g
            where g.namespace = _namespace and g.name = _name and g.grant_limit <> l.grant_limit);
end
$lh$;

-- Expire what is over for a name that no caller asked about, and wake the waiter that is next.
create or replace function "leasehold".lh_sweep_name_v1(
    _namespace text, _bucket integer, _name text, _now bigint
) returns void
language plpgsql as $lh$
begin
    perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    delete from "leasehold".lh_waiter where namespace = _namespace and name = _name and heartbeat_expires_at <= _now;
    perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
end
$lh$;

-- Other buckets are only locked if they are free: a transaction that has a bucket never waits for another one, so there
-- is no deadlock.
create or replace function "leasehold".lh_try_sweep_name_v1(_namespace text, _bucket integer, _name text) returns void
language plpgsql as $lh$
begin
    perform 1 from "leasehold".lh_bucket where namespace = _namespace and bucket = _bucket for update skip locked;
    if found then
        perform "leasehold".lh_sweep_name_v1(_namespace, _bucket, _name, "leasehold".lh_now_v1());
    end if;
end
$lh$;

-- Expire grants of names that no client asks for any more: 8 blocks of the table at a time, in a cycle. Each client
-- counts its own rounds. (An index on the end times would cost each grant 8 us and 70 bytes of WAL, and each renewal
-- more: an update that changes no index stays within its block.)
create or replace function "leasehold".lh_sweep_v1(_round bigint) returns void
language plpgsql set enable_seqscan = off set jit = off as $lh$
declare
    _expired record;
    _now bigint := "leasehold".lh_now_v1();
    _blocks bigint := (
        select pg_relation_size(typrelid) / current_setting('block_size')::integer
        from pg_type where oid = pg_typeof(null::"leasehold".lh_grant));
    _first bigint := _round % (_blocks / 8 + 1) * 8;
    _from tid := format('(%s,0)', _first);
    _to tid := format('(%s,0)', _first + 8);
begin
    for _expired in
        select namespace, bucket, name from "leasehold".lh_grant
        where ctid >= _from and ctid < _to and until + delay <= _now
        order by random() limit 8  -- transactions of the application may keep some of them for long
    loop
        perform "leasehold".lh_try_sweep_name_v1(_expired.namespace, _expired.bucket, _expired.name);
    end loop;
    if _round % 8 = 0 then  -- also remove queues whose waiters are all dead
        for _expired in
            select l.namespace, l.bucket, l.name from "leasehold".lh_queue l where (
                -- `not exists` would be a join: planned for few rows, it would read all waiters for each queue later
                select true from "leasehold".lh_waiter w
                where w.namespace = l.namespace and w.name = l.name and w.heartbeat_expires_at > _now limit 1) is null
                and (not l.limit_set or (
                    select true from "leasehold".lh_waiter w where w.namespace = l.namespace and w.name = l.name limit 1))
            limit 8
        loop
            perform "leasehold".lh_try_sweep_name_v1(_expired.namespace, _expired.bucket, _expired.name);
        end loop;
    end if;
end
$lh$;
