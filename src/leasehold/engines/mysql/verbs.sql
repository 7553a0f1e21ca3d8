-- The verbs of the engine: each is one call and one transaction. Attempt and release begin in fast_path.sql. They run
-- with the rights of their owner: an account that uses locks needs the right to execute these procedures, and no right
-- to any table.
--
-- A verb that ends a held grant locks the grant's row first, and then the bucket: a transaction of the application may
-- have that row, and a verb that waits for it must not make others wait for the bucket. All other verbs lock the
-- bucket, and then only rows that are free. So there is no deadlock.

delimiter $$

-- An attempt on a name that may have grants or waiters. answer: 1 granted (token, life, slot), 0 busy (token, life and
-- holder of the grant that ends first; queue position, at most 1,000), 2 the name is of another kind.
create procedure if not exists lh_attempt_contended_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _client varbinary(64),
    _label varbinary(4096), _host varbinary(4096), _pid bigint, _purpose varbinary(4096),
    _mode varbinary(16), _kind varbinary(16), _grant_limit integer, _ttl bigint, _delay bigint, _min_hold bigint, _queue boolean,
    _sweep integer
)
begin
    declare _now, _last_token, _token, _own_token, _ticket, _life, _queue_position, _found_pid bigint;
    declare _answer, _slot, _free_slot, _state, _found_grant_limit integer;
    declare _found_kind varbinary(16);
    declare _found_label, _found_host, _found_purpose varbinary(4096);
    declare _idle, _fits, _has_waiters, _row_locked, _reserved, _last_token_stale, _is_sole, _must_advance boolean;
    declare _limit_set boolean default false;
    call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
    select not exists (select 1 from lh_grant where namespace = _namespace and name = _name)
        and not exists (select 1 from lh_queue where namespace = _namespace and name = _name) into _idle;
    set _last_token_stale = not _idle;
    if not _idle then
        call lh_expire_grants_v1(_namespace, _name, _now);
        select kind, grant_limit into _found_kind, _found_grant_limit from lh_grant
            where namespace = _namespace and name = _name limit 1;
        select kind, grant_limit, limit_set into _found_kind, _found_grant_limit, _limit_set from lh_queue
            where namespace = _namespace and name = _name and (
                limit_set or _found_kind is not null or exists (  -- a dead waiter does not determine the kind
                    select 1 from lh_waiter
                    where namespace = _namespace and name = _name and heartbeat_expires_at > _now));
        if _found_kind is null then  -- only dead waiters are left
            delete from lh_waiter where namespace = _namespace and name = _name;
            delete from lh_queue where namespace = _namespace and name = _name;
            set _idle = true;
        elseif _found_kind <> _kind or _found_grant_limit <> _grant_limit and not _limit_set then
            set _answer = 2;
        else
            set _grant_limit = _found_grant_limit;
            select token, state into _own_token, _state from lh_grant
                where namespace = _namespace and name = _name and id_hash = _id_hash and state in (1, 2) limit 1;
            if _own_token is null then
                delete from lh_waiter
                    where id_hash = _id_hash and namespace = _namespace and name = _name
                        and heartbeat_expires_at <= _now;
                select max(ticket) into _ticket from lh_waiter
                    where id_hash = _id_hash and namespace = _namespace and name = _name;
                if _ticket is null then
                    call lh_advance_v1(_namespace, _bucket, _name, _now, '');
                    select exists (
                            select 1 from lh_waiter where namespace = _namespace and name = _name and passed = 0)
                        into _has_waiters;
                    if not _has_waiters then
                        call lh_can_admit_v1(_namespace, _name, _mode, _fits, _free_slot);
                        set _idle = _fits;
                    end if;
                end if;
            end if;
        end if;
    end if;
    if _idle then  -- no claim waits, and the name admits one more
        if _last_token_stale then  -- reservations may have taken tokens meanwhile
            select token into _last_token from lh_bucket where namespace = _namespace and bucket = _bucket;
        end if;
        set _token = greatest(_last_token + 1, _now);
        update lh_bucket set token = _token where namespace = _namespace and bucket = _bucket;
        set _slot = if(_kind = 'semaphore', coalesce(_free_slot, 0), null);
        insert into lh_grant (
                namespace, name, token, bucket, id_hash, state, client, label, host, pid, purpose, mode, kind,
                grant_limit, slot, delay, min_hold, ticket, since, heartbeat_expires_at, until)
            values (
                _namespace, _name, _token, _bucket, _id_hash, 2, _client, _label, _host, _pid, _purpose, _mode, _kind,
                _grant_limit, _slot, _delay, _min_hold, 0, _now, _now + 15000000, _now + _ttl);
        set _answer = 1, _life = _ttl;
        if _sweep > 0 then  -- now and then, check whether this is the bucket's only grant, unless that is a long search
            select count(*) < 256 and count(if(bucket = _bucket, 1, null)) = 1 into _is_sole from (
                (select bucket from lh_grant where namespace = _namespace limit 256) union all
                (select bucket from lh_queue where namespace = _namespace limit 256)) found;
            if _is_sole then
                update lh_bucket set sole_token = _token where namespace = _namespace and bucket = _bucket;
            end if;
        end if;
    elseif _answer is null and _own_token is null and (_queue or _ticket is not null) then
        if _ticket is null then
            update lh_bucket set ticket = ticket + 1, sole_token = null
                where namespace = _namespace and bucket = _bucket;
            select ticket into _ticket from lh_bucket where namespace = _namespace and bucket = _bucket;
            delete from lh_waiter
                where namespace = _namespace and name = _name and passed = 1 and heartbeat_expires_at <= _now;
            insert into lh_queue values (_namespace, _name, _bucket, _kind, _grant_limit, '', 0, '', false)
                on duplicate key update grant_limit = lh_queue.grant_limit;
            insert into lh_waiter values (
                _namespace, _name, 0, _ticket, _id_hash, _client, _label, _host, _pid, _purpose, _mode, _delay,
                _now, _now + 15000000);
        else
            update lh_waiter set passed = 0, heartbeat_expires_at = _now + 15000000, client = _client
                where id_hash = _id_hash and namespace = _namespace and name = _name;
        end if;
        call lh_advance_v1(_namespace, _bucket, _name, _now, _id_hash);
        select token, state into _own_token, _state from lh_grant
            where namespace = _namespace and name = _name and id_hash = _id_hash and state in (1, 2) limit 1;
        if _own_token is null then
            select count(*), exists (
                    select 1 from lh_grant where namespace = _namespace and name = _name and state = 1)
                into _queue_position, _reserved from (
                    select 1 from lh_waiter
                    where namespace = _namespace and name = _name and passed = 0 and ticket < _ticket
                        and heartbeat_expires_at > _now
                    limit 1000) c;
        end if;
    end if;
    if _own_token is not null then
        -- Reserved or held: the same token, and at least the requested ttl. `until` never moves back (E2, E8). If a
        -- transaction of its holder has the row of a held grant locked, the grant keeps the life it has.
        if _state = 2 then
            select 1 into _row_locked from lh_grant
                where namespace = _namespace and name = _name and token = _own_token for update skip locked;
        end if;
        if _state = 1 or _row_locked then
            update lh_grant set
                    until = greatest(if(state = 1, _now, until), _now + _ttl),
                    since = if(state = 1, _now, since),
                    state = 2, client = _client, delay = _delay, min_hold = _min_hold, heartbeat_expires_at = _now + 15000000
                where namespace = _namespace and name = _name and token = _own_token;
        end if;
        select token, until - _now, slot into _token, _life, _slot
            from lh_grant where namespace = _namespace and name = _name and token = _own_token;
        set _answer = 1;
        -- An exclusive grant admits no other claim: there is nothing to do unless the head is gone or must re-check
        -- sooner than it knows.
        select mode = 'shared' or _kind = 'semaphore' or exists (
                select 1 from lh_queue l
                where namespace = _namespace and name = _name and (notified_recheck_at > _now + _life or not exists (
                    select 1 from lh_waiter w
                    where w.id_hash = l.notified_id_hash and w.namespace = _namespace and w.name = _name and w.passed = 0
                        and w.heartbeat_expires_at > _now)))
            into _must_advance from lh_grant where namespace = _namespace and name = _name and token = _own_token;
        if _must_advance then
            call lh_advance_v1(_namespace, _bucket, _name, _now, '');
        end if;
    elseif _answer is null then
        set _answer = 0;
        select token, if(until > _now, until - _now, 100000), label, host, pid, purpose
            into _token, _life, _found_label, _found_host, _found_pid, _found_purpose
            from lh_grant where namespace = _namespace and name = _name order by until, token limit 1;
        if _queue_position = 0 and _reserved then  -- the head re-checks soon whether a reservation's client is alive
            set _life = least(_life, 1000000);
        end if;
    end if;
    call lh_end_v1(_sweep);
    select _answer, _token, _life, _slot, _queue_position, _found_label, _found_host, _found_pid, _found_purpose,
        _found_kind, _found_grant_limit;
end
$$

-- Renew held grants that are still live, compared by id hash and token. No bucket is locked. If another transaction has
-- a grant's row locked, that grant keeps the end it has. Never moves an end back (E8).
-- _claims: JSON, [[namespace, name, id_hash, token, ttl, bucket], ...], texts in hexadecimal.
-- life: null when gone; why: 't' it ended unrenewed, and no claim has asked for the name since; 'b' it was broken.
create procedure if not exists lh_renew_v1(_claims longtext character set utf8mb4, _lock_timeout_ms integer)
begin
    declare _done boolean default false;
    declare _namespace, _name varbinary(255);
    declare _id_hash varbinary(64);
    declare _token, _ttl, _now, _until bigint;
    declare _claim_cursor cursor for
        select unhex(a.namespace), unhex(a.name), unhex(a.id_hash), a.token, a.ttl
        from json_table(_claims, '$[*]' columns (
            namespace varchar(510) path '$[0]', name varchar(510) path '$[1]', id_hash varchar(128) path '$[2]',
            token bigint path '$[3]', ttl bigint path '$[4]')) a;
    declare continue handler for not found set _done = true;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    open _claim_cursor;
    claims: loop
        set _done = false;  -- other statements of the loop may have set it
        fetch _claim_cursor into _namespace, _name, _id_hash, _token, _ttl;
        if _done then
            leave claims;
        end if;
        set _until = null;
        select until into _until from lh_grant
            where namespace = _namespace and name = _name and token = _token and id_hash = _id_hash and state = 2
            for update skip locked;
        set _now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
        if _until > _now then
            update lh_grant set until = greatest(until, _now + _ttl)
                where namespace = _namespace and name = _name and token = _token;
        end if;
    end loop;
    close _claim_cursor;
    set _now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    select a.ordinal, if(g.until > _now, g.until - _now, null),
        case when g.until <= _now then 't' when find_in_set(a.token, b.broken_tokens) > 0 then 'b' else 'f' end
        from json_table(_claims, '$[*]' columns (
            ordinal for ordinality, namespace varchar(510) path '$[0]', name varchar(510) path '$[1]',
            id_hash varchar(128) path '$[2]', token bigint path '$[3]', bucket integer path '$[5]')) a
        left join lh_grant g on g.namespace = unhex(a.namespace) and g.name = unhex(a.name) and g.token = a.token
            and g.id_hash = unhex(a.id_hash) and g.state = 2
        left join lh_bucket b on b.namespace = unhex(a.namespace) and b.bucket = a.bucket;
    commit;
end
$$

-- Heartbeat: keep claims queued (E7). It extends no reservation and re-queues no claim. Every call that locks several
-- buckets locks them in the same order. behind: other claims are ahead, so this one need not attempt.
-- _claims: JSON, [[namespace, bucket, name, id_hash], ...], texts in hexadecimal.
create procedure if not exists lh_heartbeat_v1(_claims longtext character set utf8mb4, _lock_timeout_ms integer)
begin
    declare _done boolean default false;
    declare _namespace, _name varbinary(255);
    declare _id_hash varbinary(64);
    declare _bucket, _locked integer;
    declare _token, _now bigint;
    declare _buckets cursor for
        select distinct unhex(a.namespace), a.bucket
        from json_table(_claims, '$[*]' columns (namespace varchar(510) path '$[0]', bucket integer path '$[1]')) a
        order by 1, 2;
    declare _claim_cursor cursor for
        select unhex(a.namespace), unhex(a.name), unhex(a.id_hash)
        from json_table(_claims, '$[*]' columns (
            namespace varchar(510) path '$[0]', name varchar(510) path '$[2]', id_hash varchar(128) path '$[3]')) a;
    declare continue handler for not found set _done = true;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    open _buckets;
    claims: loop
        set _done = false;  -- other statements of the loop may have set it
        fetch _buckets into _namespace, _bucket;
        if _done then
            leave claims;
        end if;
        select 1 into _locked from lh_bucket where namespace = _namespace and bucket = _bucket for update;
    end loop;
    close _buckets;
    set _now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)), _done = false;
    open _claim_cursor;
    claims: loop
        set _done = false;  -- other statements of the loop may have set it
        fetch _claim_cursor into _namespace, _name, _id_hash;
        if _done then
            leave claims;
        end if;
        update lh_waiter set heartbeat_expires_at = _now + 15000000
            where id_hash = _id_hash and namespace = _namespace and name = _name and heartbeat_expires_at > _now;
        select min(token) into _token from lh_grant
            where namespace = _namespace and name = _name and id_hash = _id_hash and state = 1
                and (until > _now or heartbeat_expires_at > _now);
        if _token is not null then
            update lh_grant set heartbeat_expires_at = _now + 15000000
                where namespace = _namespace and name = _name and token = _token;
        end if;
    end loop;
    close _claim_cursor;
    select a.ordinal,
        if(w.id_hash is not null or exists (
            select 1 from lh_grant g
            where g.namespace = unhex(a.namespace) and g.name = unhex(a.name) and g.id_hash = unhex(a.id_hash)
                and (g.state in (1, 2) and g.until > _now or g.state = 1 and g.heartbeat_expires_at > _now)), 't', 'f'),
        if(w.passed = 0 and w.ticket > (  -- `exists` with an earlier ticket would read the whole queue for its head
            select f.ticket from lh_waiter f
            where f.namespace = w.namespace and f.name = w.name and f.passed = 0 order by f.ticket limit 1), 't', 'f')
        from json_table(_claims, '$[*]' columns (
            ordinal for ordinality, namespace varchar(510) path '$[0]', name varchar(510) path '$[2]',
            id_hash varchar(128) path '$[3]')) a
        left join lh_waiter w on w.id_hash = unhex(a.id_hash) and w.namespace = unhex(a.namespace)
            and w.name = unhex(a.name) and w.heartbeat_expires_at > _now;
    commit;
end
$$

-- A release that the fast path cannot make: of a queue position or a reservation, with min_hold, or too late.
create procedure if not exists lh_release_contended_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _keep boolean,
    _held boolean, out _ended boolean
)
begin
    declare _now, _last_token, _token, _locked, _since, _until, _min_hold bigint;
    declare _state integer;
    set _ended = false;
    select max(token) into _token from lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and state = 2;
    if _token is not null and _held then
        select token, state, since, until, min_hold into _locked, _state, _since, _until, _min_hold from lh_grant
            where namespace = _namespace and name = _name and token = _token and state = 2 for update;
    end if;
    call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
    if _until <= _now then
        set _state = null;  -- too late
    elseif _locked is null then  -- read again: before the bucket was locked, the claim may have changed its state
        select token, state, since, min_hold into _token, _state, _since, _min_hold from lh_grant
            where namespace = _namespace and name = _name and id_hash = _id_hash and state in (1, 2) and until > _now
            limit 1;
        if _state = 2 and _held then
            select token into _locked from lh_grant
                where namespace = _namespace and name = _name and token = _token for update skip locked;
        end if;
    end if;
    if _state = 2 and _held and _locked is null then
        signal sqlstate '45000' set message_text = 'a transaction has just checked this lease', mysql_errno = 1205;
    end if;
    set _since = least(_since, _now);
    if _state = 2 and _held and _keep and _since + _min_hold > _now then
        update lh_grant set state = 3, delay = 0, until = _since + _min_hold
            where namespace = _namespace and name = _name and token = _token;
        set _ended = true;
    elseif _state = 1 or _state = 2 and _held then
        delete from lh_grant where namespace = _namespace and name = _name and token = _token;
        set _ended = true;
    else
        -- First: this turns an unclaimed reservation back into a queue position, which is then deleted.
        call lh_expire_grants_v1(_namespace, _name, _now);
        delete from lh_waiter where id_hash = _id_hash and namespace = _namespace and name = _name;
    end if;
    call lh_advance_if_queued_v1(_namespace, _bucket, _name, _now);
end
$$

-- Refuse a reservation whose client cannot be notified: pass the claim over and reserve for the next waiter, unless
-- another client serves the claim by now. Never ends a grant.
create procedure if not exists lh_decline_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _client varbinary(64),
    _lock_timeout_ms integer
)
begin
    declare _now, _last_token, _token bigint;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
    call lh_expire_grants_v1(_namespace, _name, _now);
    select max(token) into _token from lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and state = 1 and client = _client;
    if _token is not null then
        call lh_pass_over_v1(_namespace, _name, _token);
    end if;
    call lh_advance_if_queued_v1(_namespace, _bucket, _name, _now);
    call lh_end_v1(0);
    select if(_token is null, 'f', 't');
end
$$

-- For operators: end the grant that has this token, whichever client holds it.
create procedure if not exists lh_break_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _token bigint, _lock_timeout_ms integer
)
begin
    declare _now, _last_token, _locked, _delay bigint;
    declare _state integer;
    declare _broken boolean default false;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    select token into _locked from lh_grant
        where namespace = _namespace and name = _name and token = _token and state <> 1 for update;
    call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
    call lh_expire_grants_v1(_namespace, _name, _now);
    -- A grant cools for its delay because its holder may not know yet: a repeated break must not cut that short.
    select state, delay into _state, _delay from lh_grant
        where namespace = _namespace and name = _name and token = _token and (state = 2 or state = 3 and delay = 0);
    if _state is not null then
        set _broken = true;
        update lh_grant set state = 3, until = _now + _delay
            where namespace = _namespace and name = _name and token = _token;
        update lh_bucket set broken_tokens = substring_index(concat_ws(',', _token, broken_tokens), ',', 16)
            where namespace = _namespace and bucket = _bucket;
        call lh_expire_grants_v1(_namespace, _name, _now);
    end if;
    call lh_advance_v1(_namespace, _bucket, _name, _now, '');
    call lh_end_v1(0);
    select if(_broken, 't', 'f');
end
$$

-- For operators: set the limit of a semaphore. It counts for every claim on the name, whatever the claim says, until it is
-- set again (E1). _limit null: remove it, so that the next claim decides again once the name is idle. 'f': the name is in
-- use as a lock. A smaller limit ends no grant. It withdraws reservations, since claiming one would make a grant.
create procedure if not exists lh_set_limit_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _limit integer, _lock_timeout_ms integer
)
begin
    declare _now, _last_token, _token, _ticket bigint;
    declare _over integer default 0;
    declare _is_lock boolean default false;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
    call lh_expire_grants_v1(_namespace, _name, _now);
    if _limit is null then
        update lh_queue set limit_set = false where namespace = _namespace and name = _name;
    else
        delete from lh_waiter where namespace = _namespace and name = _name and heartbeat_expires_at <= _now;
        select exists (select 1 from lh_grant where namespace = _namespace and name = _name and kind = 'lock')
            or exists (
                select 1 from lh_queue l join lh_waiter w on w.namespace = l.namespace and w.name = l.name
                where l.namespace = _namespace and l.name = _name and l.kind = 'lock')
            into _is_lock;
    end if;
    if _limit is not null and not _is_lock then
        update lh_bucket set sole_token = null where namespace = _namespace and bucket = _bucket;  -- see fast_path.sql
        insert into lh_queue values (_namespace, _name, _bucket, 'semaphore', _limit, '', 0, '', true)
            on duplicate key update kind = 'semaphore', grant_limit = _limit, limit_set = true;
        select count(*) - _limit into _over from lh_grant where namespace = _namespace and name = _name;
    end if;
    while _over > 0 do
        set _ticket = null;
        select token, ticket into _token, _ticket from lh_grant
            where namespace = _namespace and name = _name and state = 1 order by token desc limit 1;
        if _ticket is null then
            set _over = 0;
        else
            call lh_pass_over_v1(_namespace, _name, _token);
            update lh_waiter set passed = 0
                where namespace = _namespace and name = _name and passed = 1 and ticket = _ticket;
            update lh_queue set notified_id_hash = '', notified_recheck_at = 0, notified_client = ''
                where namespace = _namespace and name = _name;  -- a new head is notified of when to re-check
            set _over = _over - 1;
        end if;
    end while;
    if not _is_lock then
        call lh_advance_v1(_namespace, _bucket, _name, _now, '');
    end if;
    call lh_end_v1(0);
    select if(_is_lock, 'f', 't');
end
$$

-- Everything live in a namespace, as one snapshot: changes nothing, locks nothing. Of an id hash it shows only the
-- fingerprint and the owner.
create procedure if not exists lh_inspect_v1(_namespace varbinary(255), _prefix varbinary(255), _exact boolean)
begin
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    select g.name, g.kind, coalesce(q.grant_limit, g.grant_limit), g.state, g.token, concat(left(g.id_hash, 16), right(g.id_hash, 8)),
        g.label, g.host, g.pid, g.purpose, g.mode, g.delay, g.ticket, g.since, g.heartbeat_expires_at, g.until, g.slot,
        _now
    from lh_grant g left join lh_queue q on q.namespace = g.namespace and q.name = g.name
    where g.namespace = _namespace and g.name >= _prefix
        and (g.name = _prefix or not _exact and left(g.name, length(_prefix)) = _prefix)
    union all
    select w.name, l.kind, l.grant_limit, if(w.passed, 4, 0), 0, concat(left(w.id_hash, 16), right(w.id_hash, 8)),
        w.label, w.host, w.pid, w.purpose, w.mode, w.delay, w.ticket, w.since, w.heartbeat_expires_at, 0, null, _now
    from lh_waiter w join lh_queue l on l.namespace = w.namespace and l.name = w.name
    where w.namespace = _namespace and w.name >= _prefix
        and (w.name = _prefix or not _exact and left(w.name, length(_prefix)) = _prefix);
end
$$

-- Return a client's notifications at once, then wait until there are more: a client that notifies this one ends the
-- wait (`kill query`) after its commit. A kill only affects the statement that it hits. So the statement that waits
-- first checks for anything new: it sees what was committed before it began, and the kill for anything later hits it.
-- A reservation that was claimed meanwhile is not new.
-- It waits for the proof of life of its own client, which it gets only if the client is gone. It does not use `sleep`:
-- if two sessions kill one sleep, MariaDB makes the second wait for 2 s, and everything that sleeps with it.
create procedure if not exists lh_listen_v1(_client varbinary(64), _seconds integer)
begin
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare _go, _head longblob;
    declare _dead integer;
    select coalesce(group_concat(id_hash, '.', token), '') into _go from lh_grant where client = _client and state = 1;
    select coalesce(group_concat(notified_id_hash, '.', notified_recheck_at), '') into _head
        from lh_queue where notified_client = _client;
    select 'reserved', id_hash, token, 0, namespace, name from lh_grant where client = _client and state = 1
    union all
    select 'recheck', notified_id_hash, notified_recheck_at, notified_recheck_at - _now, namespace, name
        from lh_queue where notified_client = _client;
    select get_lock(concat('lh.life.', left(sha2(_client, 256), 40)), if(
        exists (
            select 1 from lh_grant
            where client = _client and state = 1 and find_in_set(concat(id_hash, '.', token), _go) = 0)
        or exists (
            select 1 from lh_queue
            where notified_client = _client
                and find_in_set(concat(notified_id_hash, '.', notified_recheck_at), _head) = 0),
        0, _seconds)) into _dead;
    if _dead = 1 then
        signal sqlstate '45000' set message_text = 'the liveness session of this client has ended';
    end if;
end
$$

-- For a transaction of the application: a row if the grant with this token is held now. Then no other claim gets the
-- name until that transaction ends, so that "still the holder" and its writes commit together.
create procedure if not exists lh_check_v1(_namespace varbinary(255), _name varbinary(255), _token bigint)
begin
    savepoint lh_check;
    select 1 from lh_grant
        where namespace = _namespace and name = _name and token = _token and state = 2
            and until > timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
        lock in share mode;
end
$$

-- A row if lh_check_v1 and this call are in one transaction: otherwise its savepoint is gone.
create procedure if not exists lh_in_transaction_v1()
begin
    declare exit handler for 1305 select 1 from dual where false;
    release savepoint lh_check;
    select 1;
end
$$

delimiter ;
