-- The verbs of the engine, one call each, which is one transaction; two of them begin in alone.sql. They run with the
-- rights of their owner: an account that uses locks needs to execute these procedures, and no right to any table.
--
-- Whoever ends a grant that is held locks its row first, and then the bucket: a transaction of the application may have
-- that row, and whoever waits for it must keep nobody else waiting. All others take the bucket, and then only such rows
-- as are free. So nobody waits in a circle.

delimiter $$

-- An attempt where somebody may be in the way. answer: 1 granted (token, life, slot), 0 busy (life and holder of what is
-- first in the way, place), 2 another kind.
create procedure if not exists lh_attempt_in_line_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _mark varbinary(64), _client varbinary(64),
    _label varbinary(4096), _host varbinary(4096), _pid bigint, _purpose varbinary(4096),
    _mode varbinary(16), _kind varbinary(16), _most integer, _ttl bigint, _delay bigint, _queue boolean,
    _sweep integer
)
begin
    declare _t, _last, _token, _mine, _ticket, _life, _place, _of bigint;
    declare _answer, _slot, _free, _state, _found_most integer;
    declare _found_kind varbinary(16);
    declare _found_label, _found_host, _found_purpose varbinary(4096);
    declare _idle, _fits, _line, _free_row, _reserved, _last_moved, _alone boolean;
    call lh_enter_v1(_namespace, _bucket, _t, _last);
    select not exists (select 1 from lh_grant where namespace = _namespace and name = _name)
        and not exists (select 1 from lh_line where namespace = _namespace and name = _name) into _idle;
    set _last_moved = not _idle;
    if not _idle then
        call lh_settle_v1(_namespace, _name, _t);
        select kind, most into _found_kind, _found_most from lh_grant
            where namespace = _namespace and name = _name limit 1;
        if _found_kind is null then
            select kind, most into _found_kind, _found_most from lh_line
                where namespace = _namespace and name = _name and exists (
                    select 1 from lh_waiter
                    where namespace = _namespace and name = _name and beat > _t);  -- the dead do not fix a kind
        end if;
        if _found_kind is null then  -- nothing that counts is left
            delete from lh_waiter where namespace = _namespace and name = _name;
            delete from lh_line where namespace = _namespace and name = _name;
            set _idle = true;
        elseif _found_kind <> _kind or _found_most <> _most then
            set _answer = 2;
        else
            select token, state into _mine, _state from lh_grant
                where namespace = _namespace and name = _name and mark = _mark and state in (1, 2) limit 1;
            if _mine is null then
                delete from lh_waiter where mark = _mark and namespace = _namespace and name = _name and beat <= _t;
                select max(ticket) into _ticket from lh_waiter
                    where mark = _mark and namespace = _namespace and name = _name;
                if _ticket is null then
                    call lh_advance_v1(_namespace, _bucket, _name, _t, '');
                    select exists (
                        select 1 from lh_waiter where namespace = _namespace and name = _name and passed = 0) into _line;
                    if not _line then
                        call lh_fits_v1(_namespace, _name, _mode, _fits, _free);
                        set _idle = _fits;
                    end if;
                end if;
            end if;
        end if;
    end if;
    if _idle then  -- nobody waits, and there is room
        if _last_moved then  -- turns were given meanwhile
            select token into _last from lh_bucket where namespace = _namespace and bucket = _bucket;
        end if;
        set _token = greatest(_last + 1, _t);
        update lh_bucket set token = _token where namespace = _namespace and bucket = _bucket;
        set _slot = if(_kind = 'semaphore', coalesce(_free, 0), null);
        insert into lh_grant (
                namespace, name, token, bucket, mark, state, client, label, host, pid, purpose, mode, kind, most,
                slot, delay, ticket, since, beat, until)
            values (
                _namespace, _name, _token, _bucket, _mark, 2, _client, _label, _host, _pid, _purpose, _mode, _kind, _most,
                _slot, _delay, 0, _t, _t + 15000000, _t + _ttl);
        set _answer = 1, _life = _ttl;
        if _sweep > 0 then  -- now and then: is nobody else in this bucket? Not where that would be a long search
            select count(*) < 256 and count(if(bucket = _bucket, 1, null)) = 1 into _alone from (
                (select bucket from lh_grant where namespace = _namespace limit 256) union all
                (select bucket from lh_line where namespace = _namespace limit 256)) found;
            if _alone then
                update lh_bucket set alone = _token where namespace = _namespace and bucket = _bucket;
            end if;
        end if;
    elseif _answer is null and _mine is null and (_queue or _ticket is not null) then
        if _ticket is null then
            update lh_bucket set ticket = ticket + 1, alone = null where namespace = _namespace and bucket = _bucket;
            select ticket into _ticket from lh_bucket where namespace = _namespace and bucket = _bucket;
            delete from lh_waiter where namespace = _namespace and name = _name and passed = 1 and beat <= _t;
            insert into lh_line values (_namespace, _name, _bucket, _kind, _most, '', 0, '')
                on duplicate key update most = lh_line.most;
            insert into lh_waiter values (
                _namespace, _name, 0, _ticket, _mark, _client, _label, _host, _pid, _purpose, _mode, _delay,
                _t, _t + 15000000);
        else
            update lh_waiter set passed = 0, beat = _t + 15000000, client = _client
                where mark = _mark and namespace = _namespace and name = _name;
        end if;
        call lh_advance_v1(_namespace, _bucket, _name, _t, _mark);
        select token, state into _mine, _state from lh_grant
            where namespace = _namespace and name = _name and mark = _mark and state in (1, 2) limit 1;
        if _mine is null then
            select count(*), exists (
                    select 1 from lh_grant where namespace = _namespace and name = _name and state = 1)
                into _place, _reserved from lh_waiter
                where namespace = _namespace and name = _name and passed = 0 and ticket < _ticket and beat > _t;
        end if;
    end if;
    if _mine is not null then
        -- Reserved or held: the same token, and at least the life it asks for. `until` never moves back (E2, E8). The
        -- row of a held one may be kept by a transaction of its holder: then its life is what it was.
        if _state = 2 then
            select 1 into _free_row from lh_grant
                where namespace = _namespace and name = _name and token = _mine for update skip locked;
        end if;
        if _state = 1 or _free_row then
            update lh_grant set
                    until = greatest(if(state = 1, _t, until), _t + _ttl),
                    since = if(state = 1, _t, since),
                    state = 2, client = _client, delay = _delay, beat = _t + 15000000
                where namespace = _namespace and name = _name and token = _mine;
        end if;
        select token, until - _t, slot into _token, _life, _slot
            from lh_grant where namespace = _namespace and name = _name and token = _mine;
        set _answer = 1;
        call lh_advance_v1(_namespace, _bucket, _name, _t, '');
    elseif _answer is null then
        set _answer = 0;
        select token, if(until > _t, until - _t, 100000), label, host, pid, purpose
            into _token, _life, _found_label, _found_host, _of, _found_purpose
            from lh_grant where namespace = _namespace and name = _name order by until, token limit 1;
        if _place = 0 and _reserved then  -- the head looks soon whether somebody given a turn is still there
            set _life = least(_life, 1000000);
        end if;
    end if;
    call lh_end_v1(_sweep);
    select _answer, _token, _life, _slot, _place, _found_label, _found_host, _of, _found_purpose, _found_kind, _found_most;
end
$$

-- Push back the ends of held grants, each compared by mark and token while it still lives. No bucket is locked. One
-- whose row another transaction has right now keeps the end it has. Never moves an end back (E8).
-- _claims: JSON, [[namespace, name, mark, token, ttl], ...], texts in hexadecimal.
-- life: null when gone; lapsed: it ended unrenewed, and nobody has asked since.
create procedure if not exists lh_renew_v1(_claims longtext character set utf8mb4, _patience integer)
begin
    declare _done boolean default false;
    declare _namespace, _name varbinary(255);
    declare _mark varbinary(64);
    declare _token, _ttl, _t, _until bigint;
    declare _asked cursor for
        select unhex(a.namespace), unhex(a.name), unhex(a.mark), a.token, a.ttl
        from json_table(_claims, '$[*]' columns (
            namespace varchar(510) path '$[0]', name varchar(510) path '$[1]', mark varchar(128) path '$[2]',
            token bigint path '$[3]', ttl bigint path '$[4]')) a;
    declare continue handler for not found set _done = true;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_patience);
    open _asked;
    claims: loop
        set _done = false;  -- whatever was not found in between
        fetch _asked into _namespace, _name, _mark, _token, _ttl;
        if _done then
            leave claims;
        end if;
        set _until = null;
        select until into _until from lh_grant
            where namespace = _namespace and name = _name and token = _token and mark = _mark and state = 2
            for update skip locked;
        set _t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
        if _until > _t then
            update lh_grant set until = greatest(until, _t + _ttl)
                where namespace = _namespace and name = _name and token = _token;
        end if;
    end loop;
    close _asked;
    set _t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    select a.nr, if(g.until > _t, g.until - _t, null), if(g.until <= _t, 't', 'f')
        from json_table(_claims, '$[*]' columns (
            nr for ordinality, namespace varchar(510) path '$[0]', name varchar(510) path '$[1]',
            mark varchar(128) path '$[2]', token bigint path '$[3]')) a
        left join lh_grant g on g.namespace = unhex(a.namespace) and g.name = unhex(a.name) and g.token = a.token
            and g.mark = unhex(a.mark) and g.state = 2;
    commit;
end
$$

-- Keep queued claims in line (E7). Lengthens no reservation, and puts nobody back in line. Their buckets are locked in
-- one order by all who lock several. behind: others stand before it, so it need not ask for itself.
-- _claims: JSON, [[namespace, bucket, name, mark], ...], texts in hexadecimal.
create procedure if not exists lh_beat_v1(_claims longtext character set utf8mb4, _patience integer)
begin
    declare _done boolean default false;
    declare _namespace, _name varbinary(255);
    declare _mark varbinary(64);
    declare _bucket, _locked integer;
    declare _token, _t bigint;
    declare _buckets cursor for
        select distinct unhex(a.namespace), a.bucket
        from json_table(_claims, '$[*]' columns (namespace varchar(510) path '$[0]', bucket integer path '$[1]')) a
        order by 1, 2;
    declare _asked cursor for
        select unhex(a.namespace), unhex(a.name), unhex(a.mark)
        from json_table(_claims, '$[*]' columns (
            namespace varchar(510) path '$[0]', name varchar(510) path '$[2]', mark varchar(128) path '$[3]')) a;
    declare continue handler for not found set _done = true;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_patience);
    open _buckets;
    claims: loop
        set _done = false;  -- whatever was not found in between
        fetch _buckets into _namespace, _bucket;
        if _done then
            leave claims;
        end if;
        select 1 into _locked from lh_bucket where namespace = _namespace and bucket = _bucket for update;
    end loop;
    close _buckets;
    set _t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)), _done = false;
    open _asked;
    claims: loop
        set _done = false;  -- whatever was not found in between
        fetch _asked into _namespace, _name, _mark;
        if _done then
            leave claims;
        end if;
        update lh_waiter set beat = _t + 15000000
            where mark = _mark and namespace = _namespace and name = _name and beat > _t;
        select min(token) into _token from lh_grant
            where namespace = _namespace and name = _name and mark = _mark and state = 1
                and (until > _t or beat > _t);
        if _token is not null then
            update lh_grant set beat = _t + 15000000
                where namespace = _namespace and name = _name and token = _token;
        end if;
    end loop;
    close _asked;
    select a.nr,
        if(w.mark is not null or exists (
            select 1 from lh_grant g
            where g.namespace = unhex(a.namespace) and g.name = unhex(a.name) and g.mark = unhex(a.mark)
                and (g.state in (1, 2) and g.until > _t or g.state = 1 and g.beat > _t)), 't', 'f'),
        if(w.passed = 0 and exists (
            select 1 from lh_waiter f
            where f.namespace = w.namespace and f.name = w.name and f.passed = 0 and f.ticket < w.ticket), 't', 'f')
        from json_table(_claims, '$[*]' columns (
            nr for ordinality, namespace varchar(510) path '$[0]', name varchar(510) path '$[2]',
            mark varchar(128) path '$[3]')) a
        left join lh_waiter w on w.mark = unhex(a.mark) and w.namespace = unhex(a.namespace)
            and w.name = unhex(a.name) and w.beat > _t;
    commit;
end
$$

-- The release of a claim that is not simply a grant of its own: of a place or a turn, with _min_hold, or too late.
create procedure if not exists lh_release_in_line_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _mark varbinary(64), _min_hold bigint,
    _held boolean, out _ended boolean
)
begin
    declare _t, _last, _token, _locked, _since, _until bigint;
    declare _state integer;
    set _ended = false;
    select max(token) into _token from lh_grant
        where namespace = _namespace and name = _name and mark = _mark and state = 2;
    if _token is not null and _held then
        select token, state, since, until into _locked, _state, _since, _until from lh_grant
            where namespace = _namespace and name = _name and token = _token and state = 2 for update;
    end if;
    call lh_enter_v1(_namespace, _bucket, _t, _last);
    if _until <= _t then
        set _state = null;  -- too late
    elseif _locked is null then  -- again: it may have been given a turn, taken it, or lost what it had, in between
        select token, state, since into _token, _state, _since from lh_grant
            where namespace = _namespace and name = _name and mark = _mark and state in (1, 2) and until > _t limit 1;
        if _state = 2 and _held then
            select token into _locked from lh_grant
                where namespace = _namespace and name = _name and token = _token for update skip locked;
        end if;
    end if;
    if _state = 2 and _held and _locked is null then
        signal sqlstate '45000' set message_text = 'a transaction has just checked this lease', mysql_errno = 1205;
    end if;
    set _since = least(_since, _t);
    if _state = 2 and _held and _min_hold > 0 and _since + _min_hold > _t then
        update lh_grant set state = 3, delay = 0, until = _since + _min_hold
            where namespace = _namespace and name = _name and token = _token;
        set _ended = true;
    elseif _state = 1 or _state = 2 and _held then
        delete from lh_grant where namespace = _namespace and name = _name and token = _token;
        set _ended = true;
    else
        call lh_settle_v1(_namespace, _name, _t);  -- a turn that was not taken in time becomes a place in line again
        delete from lh_waiter where mark = _mark and namespace = _namespace and name = _name;
    end if;
    call lh_follow_v1(_namespace, _bucket, _name, _t);
end
$$

-- The operator's: end the grant that has this token, whoever owns it.
create procedure if not exists lh_break_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _token bigint, _patience integer
)
begin
    declare _t, _last, _locked, _delay bigint;
    declare _state integer;
    declare _broken boolean default false;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_patience);
    select token into _locked from lh_grant
        where namespace = _namespace and name = _name and token = _token and state <> 1 for update;
    call lh_enter_v1(_namespace, _bucket, _t, _last);
    call lh_settle_v1(_namespace, _name, _t);
    -- What cools for a delay guards against a holder not yet told: a repeated break must not cut it short.
    select state, delay into _state, _delay from lh_grant
        where namespace = _namespace and name = _name and token = _token and (state = 2 or state = 3 and delay = 0);
    if _state is not null then
        set _broken = true;
        update lh_grant set state = 3, until = _t + _delay
            where namespace = _namespace and name = _name and token = _token;
        call lh_settle_v1(_namespace, _name, _t);
    end if;
    call lh_advance_v1(_namespace, _bucket, _name, _t, '');
    call lh_end_v1(0);
    select if(_broken, 't', 'f');
end
$$

-- Everything live in a namespace, as one snapshot: changes nothing, locks nothing. Of a mark only what may be shown.
create procedure if not exists lh_inspect_v1(_namespace varbinary(255), _prefix varbinary(255), _exact boolean)
begin
    declare _t bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    select g.name, g.kind, g.most, g.state, g.token, concat(left(g.mark, 16), right(g.mark, 8)),
        g.label, g.host, g.pid, g.purpose, g.mode, g.delay, g.ticket, g.since, g.beat, g.until, g.slot, _t
    from lh_grant g
    where g.namespace = _namespace and g.name >= _prefix
        and (g.name = _prefix or not _exact and left(g.name, length(_prefix)) = _prefix)
    union all
    select w.name, l.kind, l.most, if(w.passed, 4, 0), 0, concat(left(w.mark, 16), right(w.mark, 8)),
        w.label, w.host, w.pid, w.purpose, w.mode, w.delay, w.ticket, w.since, w.beat, 0, null, _t
    from lh_waiter w join lh_line l on l.namespace = w.namespace and l.name = w.name
    where w.namespace = _namespace and w.name >= _prefix
        and (w.name = _prefix or not _exact and left(w.name, length(_prefix)) = _prefix);
end
$$

-- What a client is to know, at once; and then wait until there is more: whoever has something to tell ends the wait
-- (`kill query`) after it has committed. A kill is over with the statement it met. So the statement that waits looks
-- first whether there is anything new: what was committed before it began it sees, and the kill for any other meets it.
-- A turn that was taken meanwhile is not new.
-- It waits for the proof of life of its own client, which it gets only when that is gone. Not in `sleep`: of two who
-- kill one sleep, MariaDB keeps the second waiting for 2 s, and all who sleep with it.
create procedure if not exists lh_listen_v1(_client varbinary(64), _seconds integer)
begin
    declare _t bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare _go, _head longblob;
    declare _dead integer;
    select coalesce(group_concat(mark, '.', token), '') into _go from lh_grant where client = _client and state = 1;
    select coalesce(group_concat(told, '.', told_end), '') into _head from lh_line where told_client = _client;
    select 'go', mark, token, 0, namespace, name from lh_grant where client = _client and state = 1
    union all
    select 'head', told, told_end, told_end - _t, namespace, name from lh_line where told_client = _client;
    select get_lock(concat('lh.life.', left(sha2(_client, 256), 40)), if(
        exists (
            select 1 from lh_grant
            where client = _client and state = 1 and find_in_set(concat(mark, '.', token), _go) = 0)
        or exists (
            select 1 from lh_line
            where told_client = _client and find_in_set(concat(told, '.', told_end), _head) = 0),
        0, _seconds)) into _dead;
    if _dead = 1 then
        signal sqlstate '45000' set message_text = 'the session that proves that this client lives has ended';
    end if;
end
$$

-- For a transaction of the application's own: a row if the grant with this token is held now. That also keeps the name
-- from everybody else until that transaction has ended, so that "still the holder" and its writes commit together.
create procedure if not exists lh_check_v1(_namespace varbinary(255), _name varbinary(255), _token bigint)
begin
    savepoint lh_check;
    select 1 from lh_grant
        where namespace = _namespace and name = _name and token = _token and state = 2
            and until > timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
        lock in share mode;
end
$$

-- A row if lh_check_v1 and this are in one transaction: without one, its savepoint is gone.
create procedure if not exists lh_open_v1()
begin
    declare exit handler for 1305 select 1 from dual where false;
    release savepoint lh_check;
    select 1;
end
$$

delimiter ;

insert into lh_meta values (1, 1) on duplicate key update version = greatest(version, 1);
