-- Attempt and release in the common case: nothing else is in the name's bucket. Each then takes two statements and
-- reads no grants or waiters. Otherwise hand_off.sql or the slow path decides (verbs.sql).
--
-- lh_bucket.sole_token is what is known of a bucket, under the lock of its row:
--     = token    lh_grant has only the grant of this token for the bucket, and lh_queue has nothing
--     = -token   neither table has anything for the bucket
--     else       unknown
-- `token` is the last one given out: any other grant, by any client, changes it, and so makes `sole_token` outdated. A
-- claim that may join a queue sets `sole_token` to null. An unclaimed reservation becomes a queue entry too, but it was
-- a grant before. So `sole_token` may say "unknown" without need, but it is never wrong. The slow path sets it again now
-- and then. (A transaction of the application may end the grant of this token, see release_on_commit.sql, and leave
-- `sole_token` as it is: the next attempt then takes the slow path.)
--
-- All reads here are by statements that lock, so the session's isolation level does not matter. Only the token's time
-- is read before the lock; a grant begins after it. A release may wait for its own row after it read the clock. That
-- does no harm: attempts made meanwhile found the name taken.
--
-- The server's cost depends less on the number of statements in a call than on the number of their kinds: a first
-- SELECT takes 27 us, a second 8. Reading grants and queue took 100 us of an attempt. An INSERT that changes the row it
-- finds takes 10 to 20 us less than an UPDATE. (MariaDB 10.11)

delimiter $$

-- Take the name; if it is busy and _queue, join or stay in the queue (E1, E2, E3, E8). Atomic under the lock of the
-- bucket's row.
create procedure if not exists lh_attempt_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _client varbinary(64),
    _label varbinary(4096), _host varbinary(4096), _pid bigint, _purpose varbinary(4096),
    _mode varbinary(16), _kind varbinary(16), _grant_limit integer, _ttl bigint, _delay bigint, _min_hold bigint, _queue boolean,
    _sweep integer, _lock_timeout_ms integer
)
begin
    declare _token bigint default last_insert_id(0);
    declare _done boolean default false;
    declare exit handler for sqlexception begin rollback; resignal; end;
    if _queue then  -- other claims are likely, and then this transaction goes on with them
        call lh_begin_v1(_lock_timeout_ms);
    else
        if @@session.innodb_lock_wait_timeout <> (_lock_timeout_ms + 999) div 1000 then
            set session innodb_lock_wait_timeout = (_lock_timeout_ms + 999) div 1000;
        end if;
        start transaction;
    end if;
    insert into lh_bucket (namespace, bucket, token, ticket) values (_namespace, _bucket, 0, 0) on duplicate key update
        ticket = ticket + _queue,
        sole_token = if(
            sole_token = -token,
            last_insert_id(greatest(token + 1, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))),
            if(_queue, null, sole_token)),
        token = greatest(token, coalesce(sole_token, 0));  -- reads the new sole_token: assignments run left to right
    set _token = last_insert_id();
    if _token > 0 then
        insert into lh_grant (
                namespace, name, token, bucket, id_hash, state, client, label, host, pid, purpose, mode, kind,
                grant_limit, slot, delay, min_hold, ticket, since, heartbeat_expires_at, until)
            values (
                _namespace, _name, _token, _bucket, _id_hash, 2, _client, _label, _host, _pid, _purpose, _mode,
                _kind, _grant_limit, if(_kind = 'semaphore', 0, null), _delay, _min_hold, 0,
                timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)),
                timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) + 15000000,
                timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) + _ttl);
        commit;
        if _sweep > 0 then
            call lh_begin_v1(_lock_timeout_ms);
            call lh_end_v1(_sweep);
        end if;
        select 1, _token, _ttl, if(_kind = 'semaphore', 0, null);
    else
        if not _queue then
            rollback;
            call lh_begin_v1(_lock_timeout_ms);
        elseif _kind = 'lock' then
            call lh_claim_or_join_v1(
                _namespace, _bucket, _name, _id_hash, _client, _label, _host, _pid, _purpose, _mode,
                _ttl, _delay, _min_hold, _sweep, _done);
        end if;
        if not _done then
            call lh_attempt_contended_v1(
                _namespace, _bucket, _name, _id_hash, _client, _label, _host, _pid, _purpose, _mode, _kind,
                _grant_limit, _ttl, _delay, _min_hold, _queue, _sweep);
        end if;
    end if;
end
$$

-- Release a claim, held or queued (E6). No row: a live grant ended. _held false: give up only a queue position or a
-- reservation; the release answers a wake-up for an unknown claim, and that claim may have been granted since.
-- _keep: the grant keeps cooling until its min_hold has passed since it began, never longer than that, even if the clock
-- stepped back. Not _keep: its min_hold does not apply. _token: of the grant, if it is known, else 0.
create procedure if not exists lh_release_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _keep boolean,
    _held boolean, _lock_timeout_ms integer, _token bigint
)
begin
    declare _now, _last_token bigint;
    declare _next_token bigint default last_insert_id(0);
    declare _ended, _was_sole, _done boolean default false;
    declare exit handler for sqlexception begin rollback; resignal; end;
    if @@session.innodb_lock_wait_timeout <> (_lock_timeout_ms + 999) div 1000 then
        set session innodb_lock_wait_timeout = (_lock_timeout_ms + 999) div 1000;
    end if;
    start transaction;
    if _token > 0 and _held then
        delete from lh_grant
            where namespace = _namespace and name = _name and token = _token and id_hash = _id_hash and state = 2
                and (min_hold = 0 or not _keep) and until > timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
        set _ended = row_count() = 1;
    end if;
    if _ended then
        insert into lh_bucket (namespace, bucket, token, ticket) values (_namespace, _bucket, 0, 0)
            on duplicate key update
                sole_token = if(sole_token = _token and token = _token, -token, sole_token),
                token = if(  -- for the next holder, if there may be one; reads the new sole_token
                    sole_token = -token, token, last_insert_id(
                        greatest(token + 1, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))));
        set _was_sole = row_count() = 2 and last_insert_id() = 0, _next_token = last_insert_id();
    end if;
    if _was_sole then
        commit;
    else
        if _ended then  -- there may be waiters
            set @lh_wake = '';
            if _next_token > 0 then
                call lh_hand_off_v1(_namespace, _bucket, _name, _next_token, _done);
            end if;
            if not _done then
                call lh_lock_bucket_v1(_namespace, _bucket, _now, _last_token);
                call lh_advance_if_queued_v1(_namespace, _bucket, _name, _now);
            end if;
        else
            rollback;
            call lh_begin_v1(_lock_timeout_ms);
            call lh_release_contended_v1(_namespace, _bucket, _name, _id_hash, _keep, _held, _ended);
        end if;
        call lh_end_v1(0);
    end if;
    if not _ended then
        select 'f';
    end if;
end
$$

delimiter ;

insert into lh_meta values (1, 1) on duplicate key update version = greatest(version, 1);
