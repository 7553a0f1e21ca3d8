-- Leasehold's tables in PostgreSQL, schema version 1. Times are microseconds since 1970 by the server's clock.
--
-- lh_bucket  one row per bucket of names in use, 1,024 at most per namespace. Its row lock serialises all verbs on the
--            names of the bucket. It keeps the last token and ticket, and is never deleted (E3)
-- lh_grant   one row per claim that occupies a name: state 1 reserved, 2 held, 3 cooling. contended: another claim
--            has asked for the name; only a transaction that has locked the bucket may end the grant
-- lh_waiter  one row per queued claim: waiting, or passed over
-- lh_queue   one row per name that has waiters or a limit that was set: its kind, and what the head of the queue was last
--            notified of. Its grant_limit counts, not those of the name's grants: they may be from before it was set.
--            limit_set: it counts whatever the claims say, and the row stays
--
-- A name without holders, waiters and a limit that was set has no row. Only the functions below use these tables: no role but their owner
-- needs a right to them.

-- Run this file as one transaction. What runs outside of the functions names other functions with their schema, and uses
-- operators only on types for which PostgreSQL has them exactly: a role that may create functions in a schema of the
-- owner's search_path can make others that fit better, which would run as the owner.
--
-- The advisory lock admits one client at a time. Every role of the database can keep it, so nothing depends on it: if
-- two clients go on without it, what one of them has created makes the other fail, which then finds it. The statement
-- after it makes the session process invalidations: its caches may still say that what another client created meanwhile
-- does not exist.
do $lh$
declare
    _lock_timeout text := pg_catalog.current_setting('lock_timeout');
begin
    perform pg_catalog.set_config('lock_timeout', '500ms', true);
    begin
        perform pg_catalog.pg_advisory_xact_lock(7308620182131241331);
    exception when lock_not_available then
        null;
    end;
    perform pg_catalog.set_config('lock_timeout', _lock_timeout, true);
    perform 1 from pg_catalog.pg_namespace limit 1;
end
$lh$;

create schema if not exists "leasehold";

create table if not exists "leasehold".lh_meta (
    id integer primary key default 1 check (id = 1),
    version integer not null
);

insert into "leasehold".lh_meta (version) values (0) on conflict do nothing;

create table if not exists "leasehold".lh_bucket (
    namespace text collate "C" not null,
    bucket integer not null,
    token bigint not null,
    ticket bigint not null,
    primary key (namespace, bucket)
) with (fillfactor = 50);

create table if not exists "leasehold".lh_grant (
    namespace text collate "C" not null,
    name text collate "C" not null,
    token bigint not null,
    bucket integer not null,
    id_hash text collate "C" not null,
    state smallint not null,
    client text collate "C" not null,
    label text not null,
    host text not null,
    pid bigint not null,
    purpose text not null,
    mode text collate "C" not null,
    kind text collate "C" not null,
    grant_limit integer not null,
    slot integer,
    delay bigint not null,
    ticket bigint not null,
    since bigint not null,
    heartbeat_expires_at bigint not null,
    until bigint not null,
    contended boolean not null,
    min_hold bigint not null,
    primary key (namespace, name, token)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

create table if not exists "leasehold".lh_waiter (
    namespace text collate "C" not null,
    name text collate "C" not null,
    passed boolean not null,
    ticket bigint not null,
    id_hash text collate "C" not null,
    client text collate "C" not null,
    label text not null,
    host text not null,
    pid bigint not null,
    purpose text not null,
    mode text collate "C" not null,
    delay bigint not null,
    since bigint not null,
    heartbeat_expires_at bigint not null,
    primary key (namespace, name, id_hash)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

-- A session keeps the plans that it made while the queue was short, when any index would do. So a query that is to read
-- few rows of a long queue leaves only one to choose: it looks for an id hash, and does not mention `passed`; or for the
-- first waiters in order of their tickets, of those passed over or of the others. The indexes are created only if they
-- are missing: that waits for transactions of others.
do $lh$
begin
    if not exists (
        select 1 from pg_catalog.pg_class where relname = 'lh_waiter_next' and relnamespace = (
            select relnamespace from pg_catalog.pg_class where oid = (select tableoid from "leasehold".lh_meta)))
    then
        create unique index lh_waiter_next on "leasehold".lh_waiter (namespace, name, ticket) where not passed;
        create unique index lh_waiter_passed on "leasehold".lh_waiter (namespace, name, ticket) where passed;
    end if;
end
$lh$;

create table if not exists "leasehold".lh_queue (
    namespace text collate "C" not null,
    name text collate "C" not null,
    bucket integer not null,
    kind text collate "C" not null,
    grant_limit integer not null,
    notified_id_hash text collate "C" not null,
    notified_recheck_at bigint not null,
    limit_set boolean not null,
    primary key (namespace, name)
) with (fillfactor = 50);
