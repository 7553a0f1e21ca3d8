-- A release that is part of a transaction of the application: it takes effect when that transaction commits, and not at
-- all if the transaction, or the savepoint around the call, is rolled back.
--
-- lh_on_commit  what the trigger below is to release. Rows are deleted before their transaction commits, so each
--               transaction sees only its own
--
-- Why no other claim is granted the name before the commit: until then the transaction has the grant's row locked, as
-- after lh_check_v1. Why the next holder sees what was committed: the grant ends in the same transaction.

create unlogged table if not exists "leasehold".lh_on_commit (
    namespace text collate "C" not null,
    bucket integer not null,
    name text collate "C" not null,
    token bigint not null,
    id_hash text collate "C" not null
);

-- 'held': done, and no other claim gets the name until the transaction ends. Otherwise nothing was changed: 'not held';
-- 'no transaction': the call is a transaction of its own, and would end the grant at once. A transaction has a number
-- once it has written anything, or has called pg_current_xact_id(); 'isolation': the commit would fail whenever the
-- lease was renewed, or another claim made, since the transaction began.
create or replace function "leasehold".lh_release_on_commit_v1(
    _namespace text, _name text, _token bigint, _id_hash text
) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _bucket integer;
begin
    if pg_current_xact_id_if_assigned() is null then
        return 'no transaction';
    elsif current_setting('transaction_isolation') <> 'read committed' then
        return 'isolation';
    end if;
    select bucket into _bucket from "leasehold".lh_grant
        where namespace = _namespace and name = _name and token = _token and id_hash = _id_hash and state = 2
            and until > "leasehold".lh_now_v1()
        for key share;
    if not found then
        return 'not held';
    end if;
    insert into "leasehold".lh_on_commit values (_namespace, _bucket, _name, _token, _id_hash);
    return 'held';
end
$lh$;

-- At the commit: end the grants and wake the next waiters, whose notifications are delivered with the commit. Even a
-- grant whose ttl is over: its row was locked, so no other claim has been granted the name.
-- The first call does this for all grants of the transaction. It locks all buckets in the order that every call uses,
-- and then all rows. A renewal may have some of these rows locked and wait for others: so this waits for no row while it
-- has another one locked.
create or replace function "leasehold".lh_commit_v1() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $lh$
declare
    _released record;
    _now bigint;
begin
    for _released in select distinct namespace, bucket from "leasehold".lh_on_commit order by 1, 2 loop
        perform 1 from "leasehold".lh_bucket
            where namespace = _released.namespace and bucket = _released.bucket for update;
    end loop;
    loop
        begin
            for _released in select * from "leasehold".lh_on_commit loop
                perform 1 from "leasehold".lh_grant
                    where namespace = _released.namespace and name = _released.name and token = _released.token
                    for no key update nowait;
            end loop;
            exit;
        exception when lock_not_available then
            perform pg_sleep(0.001);
        end;
    end loop;
    _now := "leasehold".lh_now_v1();
    for _released in delete from "leasehold".lh_on_commit returning * loop
        delete from "leasehold".lh_grant where ctid = (
            select ctid from "leasehold".lh_grant
            where namespace = _released.namespace and name = _released.name and token = _released.token
                and id_hash = _released.id_hash and state = 2 and least(since, _now) + min_hold <= _now
            for update skip locked);
        if not found then
            -- min_hold keeps the grant for a while; or another transaction of its holder has its row locked, and then
            -- the grant ends with that transaction.
            update "leasehold".lh_grant set
                    state = case when least(since, _now) + min_hold > _now then 3 else state end,
                    delay = 0,
                    until = greatest(least(since, _now) + min_hold, _now)
                where namespace = _released.namespace and name = _released.name and token = _released.token
                    and id_hash = _released.id_hash and state = 2;
        end if;
        perform "leasehold".lh_sweep_name_v1(_released.namespace, _released.bucket, _released.name, _now);
    end loop;
    return null;
end
$lh$;

-- Only if it is missing: creating it would wait for open transactions of the application.
do $lh$
begin
    if not exists (
        select 1 from pg_catalog.pg_trigger t join pg_catalog.pg_class c on c.oid = t.tgrelid
        where t.tgname = 'lh_commit' and c.relnamespace = (
            select relnamespace from pg_catalog.pg_class where oid = (select tableoid from "leasehold".lh_meta)))
    then
        create constraint trigger lh_commit after insert on "leasehold".lh_on_commit
            deferrable initially deferred for each row execute function "leasehold".lh_commit_v1();
    end if;
end
$lh$;
