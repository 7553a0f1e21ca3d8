-- Leasehold's tables in PostgreSQL, schema version 1. Times are microseconds since 1970 by the server's clock.
--
-- lh_bucket  one row per bucket of names in use, 1,024 at most per namespace. Its row lock serialises all that happens
--            to the names of the bucket; it keeps the last token and ticket, and stays for ever (E3)
-- lh_grant   one row per claim that occupies a name: 1 reserved, 2 held, 3 cooling. watched: somebody else came
--            for the name since, or before; only whoever has the bucket may end it
-- lh_waiter  one row per claim in line: waiting, or passed over
-- lh_queue    one row per name that has waiters: its kind, and what the head of the line was told
--
-- A name without holders and waiters has no row. Only the functions below touch these tables: nobody needs a right to
-- them but their owner.

-- To be run as one transaction. One at a time: the second statement makes the session hear what another has made while
-- this one waited, for it may remember that nothing was there.
do $lh$
begin
    perform pg_advisory_xact_lock(7308620182131241331);
    perform 1 from pg_namespace limit 1;
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
    primary key (namespace, name, passed, ticket),
    unique (namespace, name, id_hash)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

create table if not exists "leasehold".lh_queue (
    namespace text collate "C" not null,
    name text collate "C" not null,
    bucket integer not null,
    kind text collate "C" not null,
    grant_limit integer not null,
    notified_id_hash text collate "C" not null,
    notified_recheck_at bigint not null,
    primary key (namespace, name)
) with (fillfactor = 50);
