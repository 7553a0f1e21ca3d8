-- The state machine of core/lock_state.py in stored procedures: the grants and the queue of one name. Only the verbs
-- call them (verbs.sql, fast_path.sql, hand_off.sql), with the row of the name's bucket locked, and pass the time.
--
--   waiting ──> reserved ──> held ──> (released)
--      ^            │          └────> cooling ──> (over)
--      └─ passed ───┘ not claimed in time, or its client cannot be notified
--
-- A transaction of the application that called lh_check_v1 may have locked a held grant's row. Nothing here waits for
-- such a row while it has the bucket locked: rows are found by reads that lock nothing, and then locked one by one, by
-- their whole key, if they are free (`skip locked`). A grant that cannot be removed keeps occupying the name, and is
-- checked again a little later (100000 us).
--
-- Reads that are not for update use `select ... into`: in `set`, `if` and `call` a sub-query locks what it reads.
--
-- The clock is utc_timestamp(6): each statement of a procedure reads it again, and no time zone affects it.

delimiter $$

-- Begin the transaction of a verb that writes, whatever the session's settings. The verb then locks the bucket, and
-- only then reads the clock: so decisions and their times have one order (E1, E3). @lh_wake collects the clients to
-- wake after the commit.
create procedure if not exists lh_begin_v1(_lock_timeout_ms integer)
begin
    set @lh_wake = '';
    set session innodb_lock_wait_timeout = (_lock_timeout_ms + 999) div 1000;
    set transaction isolation level read committed;  -- a snapshot from before the lock would show an outdated queue
    start transaction;
end
$$

create procedure if not exists lh_lock_bucket_v1(
    _namespace varbinary(255), _bucket integer, out _now bigint, out _last_token bigint  -- the last token given out
)
begin
    select token into _last_token from lh_bucket where namespace = _namespace and bucket = _bucket for update;
    if _last_token is null then
        -- Not `insert ignore`: concurrent callers would get shared locks, and then deadlock over the exclusive one.
        insert into lh_bucket (namespace, bucket, token, ticket) values (_namespace, _bucket, 0, 0)
            on duplicate key update ticket = lh_bucket.ticket;
        select token into _last_token from lh_bucket where namespace = _namespace and bucket = _bucket for update;
    end if;
    set _now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
end
$$

-- End a verb. _sweep: 1 to expire grants of names that no caller asks for, 2 to remove queues of dead waiters too.
create procedure if not exists lh_end_v1(_sweep integer)
begin
    declare _expired boolean;
    if _sweep > 0 then  -- mostly nothing has expired, and this check costs a quarter of a sweep
        select exists (
                select 1 from lh_grant where ends <= timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
            into _expired;
        if _expired or _sweep > 1 then
            call lh_sweep_v1(_sweep > 1);
        end if;
    end if;
    commit;
    if @lh_wake <> '' then
        call lh_wake_v1();
    end if;
end
$$

-- Whether a client can be notified: it holds a user lock named after its address for as long as its session lives. A
-- client without an address counts as reachable, because it polls. The lock's name is a hash, so that it does not
-- reveal the address.
create procedure if not exists lh_reachable_v1(_client varbinary(64), out _reachable boolean)
begin
    set _reachable = _client = '' or is_used_lock(concat('lh.life.', left(sha2(_client, 256), 40))) is not null;
end
$$

-- Remember to wake this client after the commit.
create procedure if not exists lh_notify_v1(_client varbinary(64))
begin
    if _client <> '' and find_in_set(_client, @lh_wake) = 0 then
        set @lh_wake = concat(@lh_wake, if(@lh_wake = '', '', ','), _client);
    end if;
end
$$

-- After the commit: wake the clients in @lh_wake. The kill can only hit a session that holds the user lock of this
-- name. That session sleeps in lh_listen_v1, which runs with the same rights as this procedure, so no further right is
-- needed.
create procedure if not exists lh_wake_v1()
begin
    declare _client varbinary(64);
    declare _session bigint;
    declare continue handler for sqlexception begin end;  -- the session is gone; the decision is already committed
    while @lh_wake <> '' do
        set _client = substring_index(@lh_wake, ',', 1);
        set @lh_wake = substring(@lh_wake, char_length(_client) + 2);
        set _session = is_used_lock(concat('lh.listener.', left(sha2(_client, 256), 40)));
        if _session is not null then
            kill query _session;
        end if;
    end while;
end
$$

-- Pass over a waiter that did not claim its reservation: it keeps its ticket, and returns at its old position when it
-- attempts again.
create procedure if not exists lh_pass_over_v1(_namespace varbinary(255), _name varbinary(255), _token bigint)
begin
    insert into lh_queue
        select namespace, name, bucket, kind, grant_limit, '', 0, '', false from lh_grant
        where namespace = _namespace and name = _name and token = _token
        on duplicate key update grant_limit = lh_queue.grant_limit;
    insert into lh_waiter
        select namespace, name, 1, ticket, id_hash, client, label, host, pid, purpose, mode, delay, since,
            heartbeat_expires_at
        from lh_grant where namespace = _namespace and name = _name and token = _token;
    delete from lh_grant where namespace = _namespace and name = _name and token = _token;
end
$$

-- End every grant, reservation and cooling time that is over by now. Runs before every decision (E1).
create procedure if not exists lh_expire_grants_v1(_namespace varbinary(255), _name varbinary(255), _now bigint)
begin
    declare _token bigint default 0;
    declare _state integer;
    declare _heartbeat_expires_at, _ends bigint;
    ended: loop
        select min(token) into _token from lh_grant
            where namespace = _namespace and name = _name and until <= _now and token > _token;
        if _token is null then
            leave ended;
        end if;
        set _state = null;
        select state, heartbeat_expires_at, ends into _state, _heartbeat_expires_at, _ends from lh_grant
            where namespace = _namespace and name = _name and token = _token and until <= _now for update skip locked;
        if _state = 2 and _ends > _now then
            update lh_grant set state = 3, until = _ends
                where namespace = _namespace and name = _name and token = _token;
        elseif _state = 1 and _heartbeat_expires_at > _now then
            call lh_pass_over_v1(_namespace, _name, _token);
        elseif _state is not null then
            delete from lh_grant where namespace = _namespace and name = _name and token = _token;
        end if;
    end loop;
end
$$

-- Whether the name admits one more claim of this mode, and the lowest free slot.
create procedure if not exists lh_can_admit_v1(
    _namespace varbinary(255), _name varbinary(255), _mode varbinary(16), out _fits boolean, out _free_slot integer
)
begin
    declare _count, _grant_limit integer;
    declare _kind varbinary(16);
    declare _exclusive boolean;
    select count(*), max(kind), max(mode = 'exclusive'), coalesce(
            (select grant_limit from lh_queue where namespace = _namespace and name = _name), max(grant_limit))
        into _count, _kind, _exclusive, _grant_limit
        from lh_grant where namespace = _namespace and name = _name;
    set _fits = _count = 0
        or (_kind = 'semaphore' and _count < _grant_limit)
        or (_kind = 'lock' and _mode = 'shared' and not _exclusive);
    set _free_slot = 0;
    if _fits and _count > 0 and _kind = 'semaphore' then  -- either 0 is free, or the number after a taken slot
        select coalesce(if(min(g.slot) > 0, 0, min(if(n.slot is null, g.slot + 1, null))), 0) into _free_slot
            from lh_grant g left join lh_grant n
                on n.namespace = g.namespace and n.name = g.name and n.slot = g.slot + 1
            where g.namespace = _namespace and g.name = _name;
    end if;
end
$$

-- Reserve for the head of the queue while the name admits it; then notify the new head of when to re-check.
-- _caller_id_hash: the claim that attempts. Its own reply informs it, and it is alive, because it has just called.
create procedure if not exists lh_advance_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _now bigint, _caller_id_hash varbinary(64)
)
advance: begin
    declare _kind varbinary(16);
    declare _id_hash, _client, _reserved_client, _notified_id_hash varbinary(64);
    declare _mode varbinary(16);
    declare _ticket, _heartbeat_expires_at, _notified_recheck_at, _token, _end, _recheck_at bigint;
    declare _grant_limit, _free_slot integer;
    declare _fits, _reachable, _reserved, _passed_over, _limit_set, _row_needed boolean;
    select kind, grant_limit, notified_id_hash, notified_recheck_at, limit_set
        into _kind, _grant_limit, _notified_id_hash, _notified_recheck_at, _limit_set
        from lh_queue where namespace = _namespace and name = _name;
    if _kind is null then
        leave advance;
    end if;
    heads: loop
        set _id_hash = null;
        select id_hash, client, mode, ticket, heartbeat_expires_at
            into _id_hash, _client, _mode, _ticket, _heartbeat_expires_at from lh_waiter
            where namespace = _namespace and name = _name and passed = 0 order by ticket limit 1;
        if _id_hash is null then
            leave heads;
        end if;
        if _id_hash <> _caller_id_hash then
            if _heartbeat_expires_at <= _now then
                delete from lh_waiter
                    where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
                iterate heads;
            end if;
            call lh_reachable_v1(_client, _reachable);
            if not _reachable then
                update lh_waiter set passed = 1
                    where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
                iterate heads;
            end if;
        end if;
        call lh_can_admit_v1(_namespace, _name, _mode, _fits, _free_slot);
        if _fits then
            update lh_bucket set token = greatest(token + 1, _now) where namespace = _namespace and bucket = _bucket;
            select token into _token from lh_bucket where namespace = _namespace and bucket = _bucket;
            insert into lh_grant (
                    namespace, name, token, bucket, id_hash, state, client, label, host, pid, purpose, mode, kind,
                    grant_limit, slot, delay, ticket, since, heartbeat_expires_at, until)
                select namespace, name, _token, _bucket, id_hash, 1, client, label, host, pid, purpose, mode, _kind,
                    _grant_limit, if(_kind = 'semaphore', _free_slot, null), delay, ticket, _now, heartbeat_expires_at,
                    _now + 3000000
                from lh_waiter where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
            delete from lh_waiter where namespace = _namespace and name = _name and passed = 0 and ticket = _ticket;
            if _id_hash <> _caller_id_hash then
                call lh_notify_v1(_client);
            end if;
            iterate heads;
        end if;
        set _passed_over = false, _token = 0;  -- a client that died after its reservation will not claim it
        reservations: loop
            select min(token) into _token from lh_grant
                where namespace = _namespace and name = _name and state = 1 and id_hash <> _caller_id_hash
                    and token > _token;
            if _token is null then
                leave reservations;
            end if;
            select client into _reserved_client from lh_grant
                where namespace = _namespace and name = _name and token = _token;
            call lh_reachable_v1(_reserved_client, _reachable);
            if not _reachable then
                call lh_pass_over_v1(_namespace, _name, _token);
                set _passed_over = true;
            end if;
        end loop;
        if _passed_over then
            iterate heads;
        end if;
        select min(if(until > _now, until, _now + 100000)), max(state = 1) into _end, _reserved
            from lh_grant where namespace = _namespace and name = _name;
        set _recheck_at = if(_reserved, least(_end, _now + 1000000), _end);
        if _id_hash = _caller_id_hash then
            if _notified_id_hash <> _id_hash or _notified_recheck_at <> _recheck_at then
                update lh_queue set notified_id_hash = _id_hash, notified_recheck_at = _recheck_at, notified_client = ''
                    where namespace = _namespace and name = _name;
            end if;
        elseif _notified_id_hash <> _id_hash or _recheck_at < _notified_recheck_at then
            call lh_notify_v1(_client);
            update lh_queue
                set notified_id_hash = _id_hash, notified_recheck_at = _recheck_at, notified_client = _client
                where namespace = _namespace and name = _name;
        end if;
        leave advance;
    end loop;
    -- No claim waits. Remove passed-over ones whose heartbeat has expired, and with the last of them the queue.
    delete from lh_waiter where namespace = _namespace and name = _name and passed = 1 and heartbeat_expires_at <= _now;
    select _limit_set or exists (select 1 from lh_waiter where namespace = _namespace and name = _name)
        or exists (  -- then the limit of the grants does not count
            select 1 from lh_grant where namespace = _namespace and name = _name and grant_limit <> _grant_limit)
        into _row_needed;
    if not _row_needed then
        delete from lh_queue where namespace = _namespace and name = _name;
    elseif _notified_id_hash <> '' then  -- no client must be woken for a claim that waits no longer
        update lh_queue set notified_id_hash = '', notified_recheck_at = 0, notified_client = ''
            where namespace = _namespace and name = _name;
    end if;
end
$$

-- After a claim has ended: reserve for the next waiter, if there is one.
create procedure if not exists lh_advance_if_queued_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _now bigint
)
begin
    declare _has_queue boolean;
    select exists (select 1 from lh_queue where namespace = _namespace and name = _name) into _has_queue;
    if _has_queue then
        call lh_expire_grants_v1(_namespace, _name, _now);
        call lh_advance_v1(_namespace, _bucket, _name, _now, '');
    end if;
end
$$

-- Expire what is over for a name that no caller asked about, and wake the waiter that is next.
create procedure if not exists lh_sweep_name_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _now bigint
)
begin
    call lh_expire_grants_v1(_namespace, _name, _now);
    delete from lh_waiter where namespace = _namespace and name = _name and heartbeat_expires_at <= _now;
    call lh_advance_v1(_namespace, _bucket, _name, _now, '');
end
$$

-- Expire grants of names that no client asks for any more, a few at a time; _queues: also remove queues whose waiters
-- are all dead. It skips locked buckets and so waits for nothing: the transaction that has a bucket expires its names.
create procedure if not exists lh_sweep_v1(_queues boolean)
begin
    declare _done boolean default false;
    declare _namespace, _name varbinary(255);
    declare _bucket, _locked integer;
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare _expired cursor for
        (select namespace, bucket, name from lh_grant where ends <= _now order by ends limit 8)
        union
        (select l.namespace, l.bucket, l.name from lh_queue l where _queues and not exists (
            select 1 from lh_waiter w
            where w.namespace = l.namespace and w.name = l.name and w.heartbeat_expires_at > _now)
            and (not l.limit_set or exists (
                select 1 from lh_waiter w where w.namespace = l.namespace and w.name = l.name)) limit 8);
    declare continue handler for not found set _done = true;
    open _expired;
    names: loop
        set _done = false;  -- other statements of the loop may have set it
        fetch _expired into _namespace, _bucket, _name;
        if _done then
            leave names;
        end if;
        set _locked = null;
        select 1 into _locked from lh_bucket
            where namespace = _namespace and bucket = _bucket for update skip locked;
        if _locked is not null then
            set _now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
            call lh_sweep_name_v1(_namespace, _bucket, _name, _now);
        end if;
    end loop;
    close _expired;
end
$$

delimiter ;
