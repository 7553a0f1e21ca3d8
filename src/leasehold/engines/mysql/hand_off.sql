-- The usual hand-off of a plain lock: its holder releases it, the first waiter claims it, and the former holder queues
-- again. The same decisions as those of lock_state.sql, in a fraction of the statements: the name has one holder, which
-- is exclusive, and nothing is expired, unreachable or overdue. Otherwise these procedures say so, and their callers go
-- on with lock_state.sql. All of it happens with the bucket locked.

delimiter $$

-- An attempt on a name that an exclusive grant occupies: claim the reservation, or join the queue. Then it commits, and
-- the reply is that of lh_attempt_v1. Not _done: nothing was changed, and lh_attempt_contended_v1 decides.
-- The caller has locked the bucket, and taken a ticket in the same step; one that is not used was never given out.
create procedure if not exists lh_claim_or_join_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _client varbinary(64),
    _label varbinary(4096), _host varbinary(4096), _pid bigint, _purpose varbinary(4096),
    _mode varbinary(16), _ttl bigint, _delay bigint, _min_hold bigint, _sweep integer, out _done boolean
)
claim_or_join: begin
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare _ticket, _own_ticket, _head_ticket, _first_ticket, _token, _until, _recheck_at, _known_recheck_at bigint;
    declare _found_pid bigint;
    declare _queue_position bigint default 0;
    declare _state integer;
    declare _found_id_hash, _found_client, _head_client varbinary(64);
    declare _found_label, _found_host, _found_purpose varbinary(4096);
    declare _reachable boolean;
    set _done = false;
    -- An exclusive grant is the only one of its name (E1). h: the head of the queue, if it was notified and is alive.
    select b.ticket, g.token, g.id_hash, g.state, g.until, g.client, g.label, g.host, g.pid, g.purpose,
            l.notified_recheck_at, h.ticket, h.client, o.ticket
        into _ticket, _token, _found_id_hash, _state, _until, _found_client, _found_label, _found_host, _found_pid,
            _found_purpose, _known_recheck_at, _head_ticket, _head_client, _own_ticket
        from lh_bucket b join lh_grant g on g.namespace = _namespace and g.name = _name
            left join lh_queue l on l.namespace = _namespace and l.name = _name
            left join lh_waiter h on h.id_hash = l.notified_id_hash and h.namespace = _namespace and h.name = _name
                and h.passed = 0 and h.heartbeat_expires_at > _now
            left join lh_waiter o on o.id_hash = _id_hash and o.namespace = _namespace and o.name = _name
        where b.namespace = _namespace and b.bucket = _bucket
            and g.mode = 'exclusive' and g.kind = 'lock' and g.until > _now limit 1;
    if _token is null or _own_ticket is not null then  -- it is queued already
        leave claim_or_join;
    end if;
    if _found_id_hash = _id_hash then
        -- Not if the head is gone, or must re-check sooner than it knows.
        if _state <> 1 or _known_recheck_at is not null and (_head_ticket is null or _known_recheck_at > _now + _ttl)
        then
            leave claim_or_join;
        end if;
        update lh_grant set
                state = 2, client = _client, delay = _delay, min_hold = _min_hold,
                heartbeat_expires_at = _now + 15000000, since = _now, until = _now + _ttl
            where namespace = _namespace and name = _name and token = _token;
        set _done = true;
        call lh_end_v1(_sweep);
        select 1, _token, _ttl, null;
        leave claim_or_join;
    end if;
    set _recheck_at = if(_state = 1, least(_until, _now + 1000000), _until);
    if _state = 1 then
        call lh_reachable_v1(_found_client, _reachable);
        if not _reachable then
            leave claim_or_join;
        end if;
    end if;
    if _known_recheck_at is not null then
        select count(*) into _queue_position from (  -- to count ten thousand would take 3 ms
            select 1 from lh_waiter
            where namespace = _namespace and name = _name and passed = 0 and heartbeat_expires_at > _now
            limit 1000) c;
        select min(ticket) into _first_ticket from lh_waiter
            where namespace = _namespace and name = _name and passed = 0;
        if _head_ticket is null or _head_ticket <> _first_ticket or _known_recheck_at > _recheck_at then
            leave claim_or_join;
        end if;
        call lh_reachable_v1(_head_client, _reachable);
        if not _reachable then
            leave claim_or_join;
        end if;
    else  -- this claim will be the head, and its reply says when to re-check
        insert into lh_queue values (_namespace, _name, _bucket, 'lock', 1, _id_hash, _recheck_at, '', false);
    end if;
    insert into lh_waiter values (
        _namespace, _name, 0, _ticket, _id_hash, _client, _label, _host, _pid, _purpose, _mode, _delay,
        _now, _now + 15000000);
    if _ticket % 16 = 0 then  -- in a queue that is never empty, claims that were passed over would accumulate
        delete from lh_waiter
            where namespace = _namespace and name = _name and passed = 1 and heartbeat_expires_at <= _now;
    end if;
    set _done = true;
    call lh_end_v1(_sweep);
    select 0, _token, if(_queue_position = 0, _recheck_at, _until) - _now, null, _queue_position, _found_label,
        _found_host, _found_pid, _found_purpose, 'lock', 1;
end
$$

-- A grant has just been deleted. If it was the only one of a plain lock, reserve the name for the first waiter, with a
-- token that the caller has taken, and notify it and the next one. Not _done: lh_advance_v1 has to go on from here, or
-- no claim waits.
create procedure if not exists lh_hand_off_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _token bigint, out _done boolean
)
hand_off: begin
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare _ticket, _next_heartbeat_expires_at bigint;
    declare _client, _next_id_hash, _next_client varbinary(64);
    declare _usual, _reachable boolean default false;
    set _done = false;
    select l.kind = 'lock' and h.mode = 'exclusive' and h.heartbeat_expires_at > _now
            and not exists (select 1 from lh_grant g where g.namespace = _namespace and g.name = _name),
            h.ticket, h.client
        into _usual, _ticket, _client
        from lh_queue l join lh_waiter h on h.namespace = _namespace and h.name = _name and h.passed = 0
        where l.namespace = _namespace and l.name = _name order by h.ticket limit 1;
    if _usual then
        call lh_reachable_v1(_client, _reachable);
    end if;
    if not _reachable then
        leave hand_off;
    end if;
    insert into lh_grant (
            namespace, name, token, bucket, id_hash, state, client, label, host, pid, purpose, mode, kind,
            grant_limit, slot, delay, ticket, since, heartbeat_expires_at, until)
        select namespace, name, _token, _bucket, id_hash, 1, client, label, host, pid, purpose, mode, 'lock',
            1, null, delay, ticket, _now, heartbeat_expires_at, _now + 3000000
        from lh_waiter where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
    delete from lh_waiter where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
    call lh_notify_v1(_client);
    -- The next one has just become the head, so it does not know yet when to re-check.
    select id_hash, client, heartbeat_expires_at into _next_id_hash, _next_client, _next_heartbeat_expires_at
        from lh_waiter where namespace = _namespace and name = _name and passed = 0 order by ticket limit 1;
    if _next_id_hash is null then
        delete from lh_queue where namespace = _namespace and name = _name and not exists (
            select 1 from lh_waiter w where w.namespace = _namespace and w.name = _name);
        set _done = row_count() = 1;
        leave hand_off;
    end if;
    set _reachable = false;
    if _next_heartbeat_expires_at > _now then
        call lh_reachable_v1(_next_client, _reachable);
    end if;
    if _reachable then
        update lh_queue set
                notified_id_hash = _next_id_hash, notified_recheck_at = _now + 1000000, notified_client = _next_client
            where namespace = _namespace and name = _name;
        call lh_notify_v1(_next_client);
        set _done = true;
    end if;
end
$$

delimiter ;
