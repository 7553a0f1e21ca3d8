-- The verbs of the engine except attempt (attempt.sql), one autocommitted call each. They run with the rights of their
-- owner: a role that uses locks needs the right to execute these functions, and no right to any table.

-- Renew held grants. Each update compares id hash and token, and that the grant is still live, in one step, so no
-- bucket is locked. If another transaction is ending or renewing a grant, the update waits for its row. Never moves an
-- end back (E8). life: null when gone; expired: it ended unrenewed, and no claim has asked for the name since.
-- One by one: a join, planned while the table was small, would read all of it once it has grown.
create or replace function "leasehold".lh_renew_v1(
    _namespaces text[], _names text[], _id_hashes text[], _tokens bigint[], _ttls bigint[],
    _lock_timeout_ms integer, _durable boolean default true
) returns table (ordinal bigint, life bigint, expired boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(_lock_timeout_ms, _durable);
    _now bigint := "leasehold".lh_now_v1();
begin
    for _i in 1 .. cardinality(_names) loop
        ordinal := _i;
        update "leasehold".lh_grant g set until = greatest(g.until, _now + _ttls[_i])
            where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.token = _tokens[_i]
                and g.id_hash = _id_hashes[_i] and g.state = 2 and g.until > _now
            returning g.until - _now into life;
        expired := false;
        if not found then
            expired := exists (
                select 1 from "leasehold".lh_grant g
                where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.id_hash = _id_hashes[_i]
                    and g.state = 2 and g.until <= _now);
        end if;
        return next;
    end loop;
end
$lh$;

-- Heartbeat: keep claims queued (E7). It extends no reservation and re-queues no claim. Every call that locks several
-- buckets locks them in the same order. behind: other claims are ahead, so this one need not attempt; null: not queued.
create or replace function "leasehold".lh_heartbeat_v1(
    _namespaces text[], _buckets integer[], _names text[], _id_hashes text[], _lock_timeout_ms integer,
    _durable boolean default true
) returns table (ordinal bigint, known boolean, behind boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
#variable_conflict use_column
declare
    _now bigint;
    _bucket_row record;
begin
    perform "leasehold".lh_prepare_v1(_lock_timeout_ms, _durable);
    for _bucket_row in
        select distinct a.namespace collate "C" as namespace, a.bucket
        from unnest(_namespaces, _buckets) as a (namespace, bucket) order by 1, 2
    loop
        perform 1 from "leasehold".lh_bucket
            where namespace = _bucket_row.namespace and bucket = _bucket_row.bucket for update;
    end loop;
    _now := "leasehold".lh_now_v1();
    for _i in 1 .. cardinality(_names) loop  -- one by one, as in lh_renew_v1
        ordinal := _i;
        update "leasehold".lh_waiter w set heartbeat_expires_at = _now + 15000000
            where w.id_hash = _id_hashes[_i] and w.namespace = _namespaces[_i] and w.name = _names[_i]
                and w.heartbeat_expires_at > _now
            returning not w.passed and w.ticket > (
                select f.ticket from "leasehold".lh_waiter f
                where f.namespace = w.namespace and f.name = w.name and not f.passed order by f.ticket limit 1)
            into behind;
        known := found;
        if not known then
            update "leasehold".lh_grant g set heartbeat_expires_at = _now + 15000000
                where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.id_hash = _id_hashes[_i]
                    and (g.state in (1, 2) and g.until > _now or g.state = 1 and g.heartbeat_expires_at > _now);
            known := found;
        end if;
        return next;
    end loop;
end
$lh$;

-- Release a claim, held or queued (E6). True: a live grant ended. _held false: give up only a queue position or a
-- reservation; the release answers a wake-up for an unknown claim, and that claim may have been granted since.
-- _keep: the grant keeps cooling until its min_hold has passed since it began, never longer than that, even if the clock
-- stepped back. Not _keep: its min_hold does not apply.
create or replace function "leasehold".lh_release_v1(
    _namespace text, _bucket integer, _name text, _id_hash text, _keep boolean, _held boolean,
    _lock_timeout_ms integer, _durable boolean default true
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(least(_lock_timeout_ms, 100), _durable);  -- until the bucket is locked
    _now bigint;
    _token bigint;
    _ended boolean;
    _sole boolean;  -- the name had one grant, because it was exclusive, and has none now
begin
    if _held then
        -- If no other claim has asked for the name since it was granted (`lh_set_contended_v1`) and no transaction has
        -- checked the lease, no other client is affected, and the bucket need not be locked: that saves a seventh of
        -- the server's work for a pair. xmax = 0: a row that a transaction has or had locked is left to the code below.
        -- If one locks the row right now, the delete waits, but not long: it may be a transaction of the application,
        -- and a caller that has the bucket may be waiting for this release.
        delete from "leasehold".lh_grant
            where namespace = _namespace and name = _name and id_hash = _id_hash and state = 2 and not contended
                and (min_hold = 0 or not _keep) and xmax = 0 and until > "leasehold".lh_now_v1();
        if found then
            return true;
        elsif pg_current_xact_id_if_assigned() is not null then
            -- The row changed during the delete, which has locked its new version. A transaction that waits for the
            -- bucket must have no row locked, because the one that has the bucket may wait for that row. So roll back,
            -- and the client sends the release again.
            raise exception 'a release collided with another call' using errcode = 'LH002';
        end if;
    end if;
    -- Lock the bucket, and take a token for the next holder in the same step, as an attempt does.
    _set := "leasehold".lh_prepare_v1(_lock_timeout_ms, _durable);
    loop
        update "leasehold".lh_bucket b set token = greatest(b.token + 1, "leasehold".lh_now_v1())
            where b.namespace = _namespace and b.bucket = _bucket
            returning b.token, "leasehold".lh_now_v1() into _token, _now;
        exit when found;
        insert into "leasehold".lh_bucket values (_namespace, _bucket, 0, 0) on conflict do nothing;
    end loop;
    delete from "leasehold".lh_grant where ctid = (
        select ctid from "leasehold".lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and until > _now
            and (state = 1 or state = 2 and _held and (not _keep or least(since, _now) + min_hold <= _now))
        for update skip locked)
        returning mode = 'exclusive' and kind = 'lock' into _sole;
    _ended := found;
    if not _ended then
        -- min_hold keeps the grant for a while; or a transaction of its holder has its row locked, and then the grant
        -- ends with that transaction.
        update "leasehold".lh_grant set
                state = case when _keep and least(since, _now) + min_hold > _now then 3 else state end,
                delay = 0,
                until = case when _keep then greatest(least(since, _now) + min_hold, _now) else _now end
            where namespace = _namespace and name = _name and id_hash = _id_hash and until > _now and state = 2
                and _held;
        _ended := found;
        -- First: this turns an unclaimed reservation back into a queue position, which is then deleted.
        perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
        delete from "leasehold".lh_waiter where id_hash = _id_hash and namespace = _namespace and name = _name;
    end if;
    if _sole then
        if "leasehold".lh_hand_off_v1(_namespace, _bucket, _name, _now, _token) then
            return true;
        end if;
    end if;
    if exists (select 1 from "leasehold".lh_queue where namespace = _namespace and name = _name) then
        if not coalesce(_sole, false) then
            perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
        end if;
        perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
    end if;
    return _ended;
end
$lh$;

-- Refuse a reservation whose client cannot be notified: pass the claim over and reserve for the next waiter, unless
-- another client serves the claim by now. Never ends a grant.
create or replace function "leasehold".lh_decline_v1(
    _namespace text, _bucket integer, _name text, _id_hash text, _client text, _lock_timeout_ms integer,
    _durable boolean default true
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _now bigint := "leasehold".lh_lock_bucket_v1(_namespace, _bucket, _lock_timeout_ms, _durable);
    _grant "leasehold".lh_grant;
    _declined boolean;
begin
    perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    select * into _grant from "leasehold".lh_grant
        where namespace = _namespace and name = _name and id_hash = _id_hash and state = 1 and client = _client;
    _declined := found;
    if _declined then
        perform "leasehold".lh_pass_over_v1(_grant);
    end if;
    perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
    return _declined;
end
$lh$;

-- For operators: end the grant that has this token, whichever client holds it. Its holder is notified.
create or replace function "leasehold".lh_break_v1(
    _namespace text, _bucket integer, _name text, _token bigint, _lock_timeout_ms integer,
    _durable boolean default true
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _now bigint := "leasehold".lh_lock_bucket_v1(_namespace, _bucket, _lock_timeout_ms, _durable);
    _grant "leasehold".lh_grant;
    _broken boolean;
begin
    perform "leasehold".lh_set_contended_v1(_namespace, _name);
    perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    -- A grant cools for its delay because its holder may not know yet: a repeated break must not cut that short.
    select * into _grant from "leasehold".lh_grant
        where namespace = _namespace and name = _name and token = _token and (state = 2 or state = 3 and delay = 0);
    _broken := found;
    if _broken then
        if _grant.state = 2 then
            perform "leasehold".lh_notify_v1(_grant.client, 'broken', _grant.id_hash, 0, _namespace, _name);
        end if;
        update "leasehold".lh_grant set state = 3, until = _now + _grant.delay
            where namespace = _namespace and name = _name and token = _token;
        perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    end if;
    perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
    return _broken;
end
$lh$;

-- For operators: set the limit of a semaphore. It counts for every claim on the name, whatever the claim says, until it is
-- set again (E1). _limit null: remove it, so that the next claim decides again once the name is idle. False: the name is
-- in use as a lock. A smaller limit ends no grant. It withdraws reservations, since claiming one would make a grant.
create or replace function "leasehold".lh_set_limit_v1(
    _namespace text, _bucket integer, _name text, _limit integer, _lock_timeout_ms integer,
    _durable boolean default true
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _now bigint := "leasehold".lh_lock_bucket_v1(_namespace, _bucket, _lock_timeout_ms, _durable);
    _over bigint;
    _grant "leasehold".lh_grant;
begin
    perform "leasehold".lh_set_contended_v1(_namespace, _name);
    perform "leasehold".lh_expire_grants_v1(_namespace, _name, _now);
    if _limit is null then
        update "leasehold".lh_queue set limit_set = false where namespace = _namespace and name = _name;
    else
        delete from "leasehold".lh_waiter
            where namespace = _namespace and name = _name and heartbeat_expires_at <= _now;
        if exists (
                select 1 from "leasehold".lh_grant where namespace = _namespace and name = _name and kind = 'lock')
            or exists (
                select 1 from "leasehold".lh_queue join "leasehold".lh_waiter using (namespace, name)
                where namespace = _namespace and name = _name and kind = 'lock')
        then
            return false;
        end if;
        insert into "leasehold".lh_queue values (_namespace, _name, _bucket, 'semaphore', _limit, '', 0, true)
            on conflict (namespace, name) do update
                set kind = excluded.kind, grant_limit = excluded.grant_limit, limit_set = true;
        select greatest(count(*) - _limit, 0) into _over
            from "leasehold".lh_grant where namespace = _namespace and name = _name;
        for _grant in
            select * from "leasehold".lh_grant
            where namespace = _namespace and name = _name and state = 1 order by token desc limit _over
        loop
            perform "leasehold".lh_pass_over_v1(_grant);
            update "leasehold".lh_waiter set passed = false
                where namespace = _namespace and name = _name and id_hash = _grant.id_hash;
            update "leasehold".lh_queue set notified_id_hash = '', notified_recheck_at = 0
                where namespace = _namespace and name = _name;  -- a new head is notified of when to re-check
        end loop;
    end if;
    perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _now, '');
    return true;
end
$lh$;

-- Everything live in a namespace, as one snapshot: changes nothing, locks nothing. Of an id hash it shows only the
-- fingerprint and the owner.
create or replace function "leasehold".lh_inspect_v1(_namespace text, _prefix text, _exact boolean)
returns table (
    name text, kind text, grant_limit integer, state integer, token bigint, id_hash text,
    label text, host text, pid bigint, purpose text, mode text, delay bigint, ticket bigint, since bigint,
    heartbeat_expires_at bigint, until bigint, slot integer, now bigint
)
language sql security definer set search_path = pg_catalog, pg_temp as $lh$
    select g.name, g.kind, coalesce(l.grant_limit, g.grant_limit), g.state, g.token, left(g.id_hash, 16) || right(g.id_hash, 8),
        g.label, g.host, g.pid, g.purpose, g.mode, g.delay, g.ticket, g.since, g.heartbeat_expires_at, g.until, g.slot,
        t.now
    from "leasehold".lh_grant g left join "leasehold".lh_queue l using (namespace, name),
        (select "leasehold".lh_now_v1() as now) t
    where g.namespace = _namespace and g.name >= _prefix
        and (g.name = _prefix or not _exact and starts_with(g.name, _prefix))
    union all
    select w.name, l.kind, l.grant_limit, case when w.passed then 4 else 0 end, 0,
        left(w.id_hash, 16) || right(w.id_hash, 8),
        w.label, w.host, w.pid, w.purpose, w.mode, w.delay, w.ticket, w.since, w.heartbeat_expires_at, 0, null, t.now
    from "leasehold".lh_waiter w join "leasehold".lh_queue l using (namespace, name),
        (select "leasehold".lh_now_v1() as now) t
    where w.namespace = _namespace and w.name >= _prefix
        and (w.name = _prefix or not _exact and starts_with(w.name, _prefix))
$lh$;

-- For a transaction of the application: whether the grant with this token is held now. If true, no other claim gets the
-- name until that transaction ends, so that "still the holder" and its writes commit together. Renewals continue
-- meanwhile, because they do not change the key.
create or replace function "leasehold".lh_check_v1(_namespace text, _name text, _token bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
begin
    perform 1 from "leasehold".lh_grant
        where namespace = _namespace and name = _name and token = _token and state = 2
            and until > "leasehold".lh_now_v1()
        for key share;
    return found;
end
$lh$;

insert into "leasehold".lh_meta (version) values (1)
    on conflict (id) do update set version = greatest(lh_meta.version, excluded.version);

-- By default every role may execute new functions. These are only for roles that are granted them.
do $lh$
declare
    _function regprocedure;
begin
    for _function in
        select p.oid from pg_catalog.pg_proc p where pg_catalog.starts_with(p.proname::text, 'lh_')
            and p.pronamespace = (
                select relnamespace from pg_catalog.pg_class where oid = (select tableoid from "leasehold".lh_meta))
    loop
        execute pg_catalog.format('revoke all on function %s from public', _function);
    end loop;
end
$lh$;
