-- A release that is part of a transaction of the application: it takes effect when that transaction commits, and not at
-- all if the transaction, or the savepoint around the call, is rolled back.
--
-- The transaction changes the grant's row to cooling, and to what is left of its min_hold: mostly nothing, and then the
-- next verb on the name removes it. Until the transaction has committed, the row is locked, and all others still see it
-- held: their attempts find the name taken, because they lock no row that is not free (lock_state.sql), renewals leave
-- the grant the end it has, and a break waits. So no other claim is granted the name before the commit, even if the ttl
-- is over.
--
-- The commit does not lock the bucket. So a held grant may become one that is over between two reads of a verb that has
-- the bucket locked, which then decides as if it had asked a moment earlier or later. No grant appears that way.

delimiter $$

-- 'held': done, and no other claim gets the name until the transaction ends. Otherwise nothing was changed: 'not held';
-- 'no transaction': each statement of this call is a transaction of its own, and the grant would end at once. A
-- savepoint shows which: without a transaction it is gone after its statement. It is the newest one when it is released,
-- which also ends all newer ones: those of the application must stay.
-- The call may be repeated: it finds its own row. A row that an earlier transaction left proves as much, because it is
-- removed before any other claim is granted in its place.
create procedure if not exists lh_release_on_commit_v1(
    _namespace varbinary(255), _name varbinary(255), _token bigint, _id_hash varbinary(64)
)
begin
    declare _cools_until bigint;
    declare _now bigint default timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
    declare exit handler for 1305 select 'no transaction';  -- 1305: there is no such savepoint
    savepoint lh_in_transaction;
    release savepoint lh_in_transaction;
    select greatest(least(since, _now) + min_hold, _now) into _cools_until from lh_grant
        where namespace = _namespace and name = _name and token = _token and id_hash = _id_hash
            and (state = 3 and delay = 0
                or state = 2 and until > timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))
        for update;
    if _cools_until is null then
        select 'not held';
    else
        update lh_grant set state = 3, delay = 0, until = _cools_until
            where namespace = _namespace and name = _name and token = _token;
        select 'held';
    end if;
end
$$

-- Release a claim after such a call, as lh_release_v1 does, but wait for no transaction of the application: the caller
-- may be the thread that is to commit it. 'o': it is still open, and nothing was changed.
create procedure if not exists lh_release_unless_locked_v1(
    _namespace varbinary(255), _bucket integer, _name varbinary(255), _id_hash varbinary(64), _keep boolean,
    _held boolean, _lock_timeout_ms integer, _token bigint
)
begin
    declare _found, _locked bigint;
    declare _ended boolean;
    declare exit handler for sqlexception begin rollback; resignal; end;
    call lh_begin_v1(_lock_timeout_ms);
    select max(token) into _found from lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and state = 2;
    if _found is not null then
        select token into _locked from lh_grant
            where namespace = _namespace and name = _name and token = _found for update skip locked;
    end if;
    if _found is not null and _locked is null then
        rollback;
        select 'o';
    else
        call lh_release_contended_v1(_namespace, _bucket, _name, _id_hash, _keep, _held, _ended);
        call lh_end_v1(0);
        select if(_ended, 't', 'f');
    end if;
end
$$

delimiter ;
