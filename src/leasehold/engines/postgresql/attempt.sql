-- Take the name; if it is busy and _queue, join or stay in the queue (E1, E2, E3, E8). Atomic under the lock of the
-- bucket's row.
--
-- The reply is one value, because eleven columns cost the server 7 us more. [1, token, life, slot]: granted. Otherwise
-- [answer, token, life, slot, queue_position, label, host, pid, purpose, kind, grant_limit], where answer is 0: busy
-- (token, life and holder of the grant that ends first; queue_position, at most 1,000), 1: granted, 2: the name is of
-- another kind.
-- States: 0 waiting, 1 reserved, 2 held, 3 cooling, 4 passed over. Times and durations are in microseconds.
create or replace function "leasehold".lh_attempt_v1(
    _namespace text, _bucket integer, _name text, _id_hash text, _client text,
    _label text, _host text, _pid bigint, _purpose text,
    _mode text, _kind text, _grant_limit integer, _ttl bigint, _delay bigint, _min_hold bigint, _queue boolean,
    _sweep integer, _lock_timeout_ms integer, _durable boolean default true
) returns json
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(_lock_timeout_ms, _durable);
    _token bigint;
    _now bigint;
    _ticket bigint;
    _slot integer := case _kind when 'semaphore' then 0 end;
    _reply json;
begin
    -- Calls of others compute with these values, send them in notifications and list them. A role may pass any. As
    -- constraints of the tables, the same comparisons would cost a pair six per cent.
    if octet_length(_namespace) > 255 or octet_length(_name) > 255 or octet_length(_id_hash) > 64
        or octet_length(_client) > 32 or octet_length(_label) > 4096 or octet_length(_host) > 4096
        or octet_length(_purpose) > 4096 or _ttl not between 0 and 1152921504606846976
        or _delay not between 0 and 1152921504606846976 or _min_hold not between 0 and 1152921504606846976
    then
        raise exception 'a value of this claim is out of range' using errcode = 'check_violation';
    end if;
    -- Lock the bucket, and take a token and a ticket in one step: one that is not used was never given out. `returning`
    -- is evaluated once the row is locked, so decisions and their times have one order (E1, E3). The insert is a
    -- separate statement, because only a later statement sees what was committed before the lock.
    loop
        update "leasehold".lh_bucket b set token = greatest(b.token + 1, "leasehold".lh_now_v1()), ticket = b.ticket + 1
            where b.namespace = _namespace and b.bucket = _bucket
            returning b.token, b.ticket, "leasehold".lh_now_v1() into _token, _ticket, _now;
        exit when found;
        insert into "leasehold".lh_bucket values (_namespace, _bucket, 0, 0) on conflict do nothing;
    end loop;
    insert into "leasehold".lh_grant select
            _namespace, _name, _token, _bucket, _id_hash, 2, _client, _label, _host, _pid, _purpose, _mode, _kind,
            _grant_limit, _slot, _delay, 0, _now, _now + 15000000, _now + _ttl, false, _min_hold
        where not exists (select 1 from "leasehold".lh_grant g where g.namespace = _namespace and g.name = _name)
            and not exists (select 1 from "leasehold".lh_queue l where l.namespace = _namespace and l.name = _name);
    if found then
        _reply := json_build_array(1, _token, _ttl, _slot);
    else
        if _queue and _kind = 'lock' then
            _reply := "leasehold".lh_claim_or_join_v1(
                _namespace, _bucket, _name, _id_hash, _client, _label, _host, _pid, _purpose,
                _mode, _ttl, _delay, _min_hold, _now, _ticket);
        end if;
        if _reply is null then
            _reply := "leasehold".lh_contend_v1(
                _namespace, _bucket, _name, _id_hash, _client, _label, _host, _pid, _purpose,
                _mode, _kind, _grant_limit, _ttl, _delay, _min_hold, _queue, _now);
        end if;
        if _reply ->> 0 = '0' then
            -- Busy promises nothing that a crash could break: its waiter would queue again. Nor do the decisions that
            -- were made on the way: a later durable commit makes them durable as well.
            _set := set_config('synchronous_commit', 'off', true);
        end if;
    end if;
    if _sweep > 0 then
        perform "leasehold".lh_sweep_v1(_sweep);
    end if;
    return _reply;
end
$lh$;

-- An attempt on a name that has a grant or a queue, with its bucket locked.
create or replace function "leasehold".lh_contend_v1(
    _namespace text, _bucket integer, _name text, _id_hash text, _client text,
    _label text, _host text, _pid bigint, _purpose text,
    _mode text, _kind text, _grant_limit integer, _ttl bigint, _delay bigint, _min_hold bigint, _queue boolean, _now bigint
) returns json
language plpgsql as $lh$
#variable_conflict use_column
declare
    _own_grant "leasehold".lh_grant;
    _ticket bigint;
    _idle boolean;
    _limit_set boolean;
    answer integer;
    token bigint;
    life bigint;
    slot integer;
    queue_position bigint;
    label text;
    host text;
    pid bigint;
    purpose text;
    kind text;
    grant_limit integer;
begin
    perform "leasehold".lh_set_contended_v1(_namespace, _name);
    perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    select l.kind, l.grant_limit, l.limit_set into kind, grant_limit, _limit_set from "leasehold".lh_queue l
        where namespace = _namespace and name = _name;
    if not found then
        select g.kind, g.grant_limit into kind, grant_limit from "leasehold".lh_grant g
            where namespace = _namespace and name = _name limit 1;
    elsif not _limit_set and not exists (select 1 from "leasehold".lh_grant where namespace = _namespace and name = _name)
        and not exists (
            select 1 from "leasehold".lh_waiter
            where namespace = _namespace and name = _name and heartbeat_expires_at > _now)
    then  -- only dead waiters are left, and they do not determine the kind
        delete from "leasehold".lh_waiter where namespace = _namespace and name = _name;
        delete from "leasehold".lh_queue where namespace = _namespace and name = _name;
        kind := null;
        grant_limit := null;
    end if;
    if kind <> _kind or grant_limit <> _grant_limit and not coalesce(_limit_set, false) then
        return json_build_array(2, null, null, null, null, null, null, null, null, kind, grant_limit);
    end if;
    _grant_limit := coalesce(grant_limit, _grant_limit);
    select * into _own_grant from "leasehold".lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and state in (1, 2);
    if not found then
        delete from "leasehold".lh_waiter
            where id_hash = _id_hash and namespace = _namespace and name = _name and heartbeat_expires_at <= _now;
        select ticket into _ticket from "leasehold".lh_waiter
            where id_hash = _id_hash and namespace = _namespace and name = _name;
        if not found then
            perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
            _idle := not exists (
                    select 1 from "leasehold".lh_waiter
                    where namespace = _namespace and name = _name and not passed)
                and "leasehold".lh_can_admit_v1(_namespace, _name, _mode);
        end if;
    end if;
    if _idle then  -- no claim waits, and the name admits one more
        update "leasehold".lh_bucket b set token = greatest(b.token + 1, _now)
            where namespace = _namespace and bucket = _bucket returning b.token into token;
        slot := case _kind when 'semaphore' then "leasehold".lh_free_slot_v1(_namespace, _name) end;
        insert into "leasehold".lh_grant values (
            _namespace, _name, token, _bucket, _id_hash, 2, _client, _label, _host, _pid, _purpose, _mode, _kind,
            _grant_limit, slot, _delay, 0, _now, _now + 15000000, _now + _ttl, true, _min_hold);
        answer := 1;
        life := _ttl;
    elsif _own_grant.id_hash is null and (_queue or _ticket is not null) then
        if _ticket is null then
            update "leasehold".lh_bucket b set ticket = b.ticket + 1
                where namespace = _namespace and bucket = _bucket returning b.ticket into _ticket;
            delete from "leasehold".lh_waiter
                where namespace = _namespace and name = _name and passed and heartbeat_expires_at <= _now;
            insert into "leasehold".lh_queue values (_namespace, _name, _bucket, _kind, _grant_limit, '', 0, false)
                on conflict do nothing;
            insert into "leasehold".lh_waiter values (
                _namespace, _name, false, _ticket, _id_hash, _client, _label, _host, _pid, _purpose, _mode, _delay,
                _now, _now + 15000000);
        else
            update "leasehold".lh_waiter set passed = false, heartbeat_expires_at = _now + 15000000, client = _client
                where id_hash = _id_hash and namespace = _namespace and name = _name;
        end if;
        perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, _id_hash);
        select * into _own_grant from "leasehold".lh_grant
            where namespace = _namespace and name = _name and id_hash = _id_hash and state in (1, 2);
        if not found then
            select count(*) into queue_position from (
                select from "leasehold".lh_waiter
                where namespace = _namespace and name = _name and not passed and ticket < _ticket
                    and heartbeat_expires_at > _now
                limit 1000) c;
        end if;
    end if;
    if _own_grant.id_hash is not null then
        -- Reserved or held: the same token, and at least the requested ttl. `until` never moves back (E2, E8).
        update "leasehold".lh_grant g set
                state = 2, client = _client, delay = _delay, min_hold = _min_hold, heartbeat_expires_at = _now + 15000000,
                since = case g.state when 1 then _now else g.since end,
                until = greatest(case g.state when 1 then _now else g.until end, _now + _ttl)
            where namespace = _namespace and name = _name and g.token = _own_grant.token
            returning g.token, g.until - _now, g.slot into token, life, slot;
        answer := 1;
        -- An exclusive grant admits no other claim: there is nothing to do unless the head is gone or must re-check
        -- sooner than it knows.
        if _own_grant.mode = 'shared' or _kind = 'semaphore' or exists (
            select 1 from "leasehold".lh_queue l
            where namespace = _namespace and name = _name and (notified_recheck_at > _now + life or not coalesce((
                select w.id_hash = l.notified_id_hash and w.heartbeat_expires_at > _now from "leasehold".lh_waiter w
                where w.namespace = _namespace and w.name = _name and not w.passed order by w.ticket limit 1), false)))
        then
            perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
        end if;
    elsif answer is null then
        answer := 0;
        select g.token, case when g.until > _now then g.until - _now else 100000 end, g.label, g.host, g.pid, g.purpose
            into token, life, label, host, pid, purpose
            from "leasehold".lh_grant g where namespace = _namespace and name = _name order by g.until, g.token limit 1;
        if queue_position = 0 and exists (  -- the head re-checks soon whether a reservation's client is still alive
            select 1 from "leasehold".lh_grant g where namespace = _namespace and name = _name and g.state = 1)
        then
            life := least(life, 1000000);
        end if;
    end if;
    return json_build_array(answer, token, life, slot, queue_position, label, host, pid, purpose, kind, grant_limit);
end
$lh$;
