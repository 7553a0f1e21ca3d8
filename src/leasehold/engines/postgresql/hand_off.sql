-- The usual hand-off of a plain lock: its holder releases it, the first waiter claims it, and the former holder queues
-- again. The same decisions as those of lock_state.sql, in a third of the statements: the name has one holder, which
-- is exclusive, and nothing is expired, unreachable or overdue. Otherwise these functions change nothing that is not
-- theirs to change, say so, and their callers go on with lock_state.sql. All of it happens with the bucket locked.

-- An attempt on a name that an exclusive grant occupies: claim the reservation, or join the queue. The reply is that of
-- lh_attempt_v1; null: nothing was changed, and lh_contend_v1 decides.
create or replace function "leasehold".lh_claim_or_join_v1(
    _namespace text, _bucket integer, _name text, _id_hash text, _client text,
    _label text, _host text, _pid bigint, _purpose text,
    _mode text, _ttl bigint, _delay bigint, _min_hold bigint, _now bigint, _ticket bigint
) returns json
language plpgsql as $lh$
declare
    _grant "leasehold".lh_grant;
    _head record;
    _recheck_at bigint;
    _position bigint := 0;
begin
    -- An exclusive grant is the only one of its name (E1). If it is contended, it cannot end before the bucket is
    -- unlocked.
    select * into _grant from "leasehold".lh_grant where namespace = _namespace and name = _name limit 1;
    if not found or _grant.mode <> 'exclusive' or _grant.kind <> 'lock' or not _grant.contended or _grant.until <= _now
    then
        return null;
    end if;
    if _grant.id_hash = _id_hash then
        update "leasehold".lh_grant g set
                state = 2, client = _client, delay = _delay, min_hold = _min_hold,
                heartbeat_expires_at = _now + 15000000, since = _now, until = _now + _ttl
            where g.namespace = _namespace and g.name = _name and g.token = _grant.token and g.state = 1
                and not exists (  -- the head is gone, or must re-check sooner than it knows
                    select 1 from "leasehold".lh_queue l
                    where l.namespace = _namespace and l.name = _name
                        and (l.notified_recheck_at > _now + _ttl or not coalesce((
                            select w.id_hash = l.notified_id_hash and w.heartbeat_expires_at > _now
                            from "leasehold".lh_waiter w
                            where w.namespace = _namespace and w.name = _name and not w.passed
                            order by w.ticket limit 1), false)));
        return case when found then json_build_array(1, _grant.token, _ttl, null) end;
    end if;
    _recheck_at := case _grant.state when 1 then least(_grant.until, _now + 1000000) else _grant.until end;
    if _grant.state = 1 and not "leasehold".lh_reachable_v1(_grant.client) then
        return null;
    end if;
    select w.client, w.heartbeat_expires_at,
            w.id_hash = l.notified_id_hash and l.notified_recheck_at <= _recheck_at as knows,
            (select count(*) from (  -- to count ten thousand would take 1.5 ms
                select from "leasehold".lh_waiter a
                where a.namespace = _namespace and a.name = _name and not a.passed and a.heartbeat_expires_at > _now
                limit 1000) c) as waiters
        into _head from "leasehold".lh_queue l, "leasehold".lh_waiter w
        where l.namespace = _namespace and l.name = _name and w.namespace = _namespace and w.name = _name
            and not w.passed
        order by w.ticket limit 1;
    if found then
        if not _head.knows or _head.heartbeat_expires_at <= _now or not "leasehold".lh_reachable_v1(_head.client) then
            return null;
        end if;
        _position := _head.waiters;
    else  -- this claim will be the head, and its reply says when to re-check
        insert into "leasehold".lh_queue values (_namespace, _name, _bucket, 'lock', 1, _id_hash, _recheck_at, false)
            on conflict do nothing;
        if not found then  -- there are claims that were passed over
            return null;
        end if;
    end if;
    insert into "leasehold".lh_waiter values (
            _namespace, _name, false, _ticket, _id_hash, _client, _label, _host, _pid, _purpose, _mode, _delay,
            _now, _now + 15000000)
        on conflict do nothing;
    if not found then  -- it is queued already
        return null;
    end if;
    if _ticket % 16 = 0 then  -- in a queue that is never empty, claims that were passed over would accumulate
        delete from "leasehold".lh_waiter where ctid = any (array(
            select p.ctid from "leasehold".lh_waiter p
            where p.namespace = _namespace and p.name = _name and p.passed and p.heartbeat_expires_at <= _now
            order by p.ticket));
    end if;
    return json_build_array(
        0, _grant.token, case _position when 0 then _recheck_at else _grant.until end - _now, null, _position,
        _grant.label, _grant.host, _grant.pid, _grant.purpose, 'lock', 1);
end
$lh$;

-- The exclusive grant of a plain lock has just been deleted: reserve the name for the first waiter, with a token that
-- the caller has taken, and notify it and the next one. False: lh_advance_v1 has to go on from here, or no claim waits.
create or replace function "leasehold".lh_hand_off_v1(
    _namespace text, _bucket integer, _name text, _now bigint, _token bigint
) returns boolean
language plpgsql as $lh$
declare
    _reserved record;
    _next record;
begin
    with head as (
        delete from "leasehold".lh_waiter w
            where w.ctid = (
                    select f.ctid from "leasehold".lh_waiter f
                    where f.namespace = _namespace and f.name = _name and not f.passed order by f.ticket limit 1)
                and w.mode = 'exclusive' and w.heartbeat_expires_at > _now and "leasehold".lh_reachable_v1(w.client)
            returning w.*
    )
    insert into "leasehold".lh_grant select
            _namespace, _name, _token, _bucket, h.id_hash, 1, h.client, h.label, h.host, h.pid, h.purpose, h.mode,
            'lock', 1, null, h.delay, h.ticket, _now, h.heartbeat_expires_at, _now + 3000000, true, 0
        from head h returning id_hash, client into _reserved;
    if not found then
        return false;
    end if;
    -- The next one has just become the head, so it does not know yet when to re-check.
    update "leasehold".lh_queue l set notified_id_hash = n.id_hash, notified_recheck_at = _now + 1000000
        from (
            select w.id_hash, w.client, w.heartbeat_expires_at from "leasehold".lh_waiter w
            where w.namespace = _namespace and w.name = _name and not w.passed order by w.ticket limit 1) n
        where l.namespace = _namespace and l.name = _name
            and n.heartbeat_expires_at > _now and "leasehold".lh_reachable_v1(n.client)
        returning n.id_hash, n.client into _next;
    if found then
        perform "leasehold".lh_notify_v1(_reserved.client, 'reserved', _reserved.id_hash, 0, _namespace, _name),
            "leasehold".lh_notify_v1(_next.client, 'recheck', _next.id_hash, 1000000, _namespace, _name);
        return true;
    end if;
    perform "leasehold".lh_notify_v1(_reserved.client, 'reserved', _reserved.id_hash, 0, _namespace, _name);
    delete from "leasehold".lh_queue l where l.namespace = _namespace and l.name = _name and not exists (
        select 1 from "leasehold".lh_waiter w where w.namespace = _namespace and w.name = _name);
    return found;
end
$lh$;
