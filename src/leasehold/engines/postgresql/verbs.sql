-- The verbs of the engine but for attempt.sql, one autocommitted call each. They all run with the rights of their owner:
-- a role that uses locks needs to execute these functions, and no right to any table.

-- Push back the ends of held grants, each compared by mark and token while it still lives, in one step: no bucket is
-- locked. A grant that is being ended or renewed by another transaction is waited for, row by row. Never moves an end
-- back (E8). life: null when gone; lapsed: it ended unrenewed, and nobody has asked since.
-- One by one: a join, planned while the table was small, would read all of it when it has grown.
create or replace function "leasehold".lh_renew_v1(
    _namespaces text[], _names text[], _marks text[], _tokens bigint[], _ttls bigint[], _patience integer
) returns table (nr bigint, life bigint, lapsed boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(_patience);
    _t bigint := "leasehold".lh_now_v1();
begin
    for _i in 1 .. cardinality(_names) loop
        nr := _i;
        update "leasehold".lh_grant g set until = greatest(g.until, _t + _ttls[_i])
            where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.token = _tokens[_i]
                and g.mark = _marks[_i] and g.state = 2 and g.until > _t
            returning g.until - _t into life;
        lapsed := false;
        if not found then
            lapsed := exists (
                select 1 from "leasehold".lh_grant g
                where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.mark = _marks[_i] and g.state = 2
                    and g.until <= _t);
        end if;
        return next;
    end loop;
end
$lh$;

-- Keep queued claims in line (E7). Lengthens no reservation, and puts nobody back in line. Their buckets are locked in
-- one order by all who lock several. behind: others stand before it, so it need not ask for itself; null: not in line.
create or replace function "leasehold".lh_beat_v1(
    _namespaces text[], _buckets integer[], _names text[], _marks text[], _patience integer
) returns table (nr bigint, known boolean, behind boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
#variable_conflict use_column
declare
    _t bigint;
    _b record;
begin
    perform "leasehold".lh_prepare_v1(_patience);
    for _b in
        select distinct a.namespace collate "C" as namespace, a.bucket
        from unnest(_namespaces, _buckets) as a (namespace, bucket) order by 1, 2
    loop
        perform 1 from "leasehold".lh_bucket where namespace = _b.namespace and bucket = _b.bucket for update;
    end loop;
    _t := "leasehold".lh_now_v1();
    for _i in 1 .. cardinality(_names) loop  -- one by one, as in lh_renew_v1
        nr := _i;
        update "leasehold".lh_waiter w set beat = _t + 15000000
            where w.mark = _marks[_i] and w.namespace = _namespaces[_i] and w.name = _names[_i] and w.beat > _t
            returning not w.passed and exists (
                select 1 from "leasehold".lh_waiter f
                where f.namespace = w.namespace and f.name = w.name and not f.passed and f.ticket < w.ticket)
            into behind;
        known := found;
        if not known then
            update "leasehold".lh_grant g set beat = _t + 15000000
                where g.namespace = _namespaces[_i] and g.name = _names[_i] and g.mark = _marks[_i]
                    and (g.state in (1, 2) and g.until > _t or g.state = 1 and g.beat > _t);
            known := found;
        end if;
        return next;
    end loop;
end
$lh$;

-- Give up a claim, held or queued (E6). True: a live grant ended. _held false: only a place or a turn is given up, for
-- a wake-up nobody knew may be about a grant that was taken since. _min_hold leaves the rest of that time to run, and no
-- more than that though the clock went back.
create or replace function "leasehold".lh_release_v1(
    _namespace text, _bucket integer, _name text, _mark text, _min_hold bigint, _held boolean, _patience integer
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _set text := "leasehold".lh_prepare_v1(least(_patience, 100));  -- until the bucket is entered
    _t bigint;
    _ended boolean;
begin
    if _held and _min_hold = 0 then
        -- Nobody has come for the name since it was granted (`lh_watch_v1`), and no transaction has asked whether it is
        -- held: nobody else is concerned, and the bucket need not be locked, a seventh of the server's work for a pair.
        -- xmax: a row that anybody has or had is left to what follows. One taken at this very moment is waited for, but
        -- not long: it may be by a transaction of the application's, and who waits for this may keep the bucket.
        delete from "leasehold".lh_grant
            where namespace = _namespace and name = _name and mark = _mark and state = 2 and not watched and xmax = 0
                and until > "leasehold".lh_now_v1();
        if found then
            return true;
        elsif pg_current_xact_id_if_assigned() is not null then
            -- It was changed at this very moment, and is locked since we looked at it again: who waits for the bucket
            -- must have no row, for who has the bucket may wait for that. Undo this, and have it sent again.
            raise exception 'a release met another call' using errcode = 'LH002';
        end if;
    end if;
    _t := "leasehold".lh_enter_v1(_namespace, _bucket, _patience);
    delete from "leasehold".lh_grant where ctid = (
        select ctid from "leasehold".lh_grant
        where namespace = _namespace and name = _name and mark = _mark and until > _t
            and (state = 1 or state = 2 and _held and (_min_hold = 0 or least(since, _t) + _min_hold <= _t))
        for update skip locked);
    _ended := found;
    if not _ended then
        -- It must be kept for a while, or a transaction of its holder has it: then it is over when that has ended.
        update "leasehold".lh_grant set
                state = case when _min_hold > 0 and least(since, _t) + _min_hold > _t then 3 else state end,
                delay = 0,
                until = case when _min_hold > 0 then greatest(least(since, _t) + _min_hold, _t) else _t end
            where namespace = _namespace and name = _name and mark = _mark and until > _t and state = 2 and _held;
        _ended := found;
        -- First: a turn that was not taken in time becomes a place in line again.
        perform "leasehold".lh_settle_v1(_namespace, _name, _t);
        delete from "leasehold".lh_waiter where mark = _mark and namespace = _namespace and name = _name;
    end if;
    if exists (select 1 from "leasehold".lh_line where namespace = _namespace and name = _name) then
        perform "leasehold".lh_settle_v1(_namespace, _name, _t);
        perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _t, '');
    end if;
    return _ended;
end
$lh$;

-- The operator's: end the grant that has this token, whoever owns it. Its holder is told.
create or replace function "leasehold".lh_break_v1(
    _namespace text, _bucket integer, _name text, _token bigint, _patience integer
) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $lh$
declare
    _t bigint := "leasehold".lh_enter_v1(_namespace, _bucket, _patience);
    _g "leasehold".lh_grant;
    _broken boolean;
begin
    perform "leasehold".lh_watch_v1(_namespace, _name);
    perform "leasehold".lh_settle_v1(_namespace, _name, _t);
    -- What cools for a delay guards against a holder not yet told: a repeated break must not cut it short.
    select * into _g from "leasehold".lh_grant
        where namespace = _namespace and name = _name and token = _token and (state = 2 or state = 3 and delay = 0);
    _broken := found;
    if _broken then
        if _g.state = 2 then
            perform "leasehold".lh_tell_v1(_g.client, 'lost', _g.mark, 0, _namespace, _name);
        end if;
        update "leasehold".lh_grant set state = 3, until = _t + _g.delay
            where namespace = _namespace and name = _name and token = _token;
        perform "leasehold".lh_settle_v1(_namespace, _name, _t);
    end if;
    perform "leasehold".lh_advance_v1(_namespace, _bucket, _name, _t, '');
    return _broken;
end
$lh$;

-- Everything live in a namespace, as one snapshot: changes nothing, locks nothing. Of a mark only what may be shown.
create or replace function "leasehold".lh_inspect_v1(_namespace text, _prefix text, _exact boolean)
returns table (
    name text, kind text, most integer, state integer, token bigint, mark text,
    label text, host text, pid bigint, purpose text, mode text, delay bigint, ticket bigint, since bigint,
    beat bigint, until bigint, slot integer, now bigint
)
language sql security definer set search_path = pg_catalog, pg_temp as $lh$
    select g.name, g.kind, g.most, g.state, g.token, left(g.mark, 16) || right(g.mark, 8),
        g.label, g.host, g.pid, g.purpose, g.mode, g.delay, g.ticket, g.since, g.beat, g.until, g.slot, t.now
    from "leasehold".lh_grant g, (select "leasehold".lh_now_v1() as now) t
    where g.namespace = _namespace and g.name >= _prefix
        and (g.name = _prefix or not _exact and starts_with(g.name, _prefix))
    union all
    select w.name, l.kind, l.most, case when w.passed then 4 else 0 end, 0, left(w.mark, 16) || right(w.mark, 8),
        w.label, w.host, w.pid, w.purpose, w.mode, w.delay, w.ticket, w.since, w.beat, 0, null, t.now
    from "leasehold".lh_waiter w join "leasehold".lh_line l using (namespace, name),
        (select "leasehold".lh_now_v1() as now) t
    where w.namespace = _namespace and w.name >= _prefix
        and (w.name = _prefix or not _exact and starts_with(w.name, _prefix))
$lh$;

-- For a transaction of the application's own: whether the grant with this token is held now. True also keeps the name
-- from everybody else until that transaction has ended, so that "still the holder" and its writes commit together.
-- Renewals go on meanwhile: they do not touch the key.
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

-- New functions are open to everybody by default. These are for whom they are granted to.
do $lh$
declare
    _function regprocedure;
begin
    for _function in
        select p.oid from pg_proc p where p.proname like 'lh\_%' and p.pronamespace = (
            select relnamespace from pg_class where oid = (select tableoid from "leasehold".lh_meta))
    loop
        execute format('revoke all on function %s from public', _function);
    end loop;
end
$lh$;
