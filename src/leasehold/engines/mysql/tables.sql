-- Leasehold's tables in MySQL or MariaDB, schema version 1. Times are microseconds since 1970 by the server's clock.
-- Text is bytes of UTF-8, compared as bytes, whatever the database's character set.
--
-- lh_bucket  one row per bucket of names in use, 1,024 at most per namespace. Its row lock serialises all verbs on the
--            names of the bucket. It keeps the last token and ticket, and is never deleted (E3)
-- lh_grant   one row per claim that occupies a name: state 1 reserved, 2 held, 3 cooling
-- lh_waiter  one row per queued claim: waiting, or passed over
-- lh_queue   one row per name that has waiters or a limit that was set: its kind, and what the head of the queue was last
--            notified of. Its grant_limit counts, not those of the name's grants: they may be from before it was set.
--            limit_set: it counts whatever the claims say, and the row stays
--
-- A name without holders, waiters and a limit that was set has no row. Only the procedures below use these tables: no account but their owner
-- needs a right to them. Everything may be run again at any time: what exists is kept.

create database if not exists `leasehold`;

use `leasehold`;

-- A procedure keeps the sql_mode that it was created with.
set session sql_mode =
    'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,NO_ZERO_DATE,NO_ZERO_IN_DATE';

create table if not exists lh_meta (
    id integer not null primary key,
    version integer not null
) engine = InnoDB;

create table if not exists lh_bucket (
    namespace varbinary(255) not null,
    bucket integer not null,
    token bigint not null,
    ticket bigint not null,
    sole_token bigint,  -- see fast_path.sql
    broken_tokens varbinary(400),  -- the last 16 grants that were broken, so that their holders learn why theirs is gone
    primary key (namespace, bucket)
) engine = InnoDB;

create table if not exists lh_grant (
    namespace varbinary(255) not null,
    name varbinary(255) not null,
    token bigint not null,
    bucket integer not null,
    id_hash varbinary(64) not null,
    state tinyint not null,
    client varbinary(64) not null,
    label varbinary(4096) not null,
    host varbinary(4096) not null,
    pid bigint not null,
    purpose varbinary(4096) not null,
    mode varbinary(16) not null,
    kind varbinary(16) not null,
    grant_limit integer not null,
    slot integer,
    delay bigint not null,
    min_hold bigint not null default 0,
    ticket bigint not null,
    since bigint not null,
    heartbeat_expires_at bigint not null,
    until bigint not null,
    ends bigint as (until + delay) virtual,  -- sweeps find expired grants by it
    primary key (namespace, name, token),
    key lh_grant_end (ends),
    key lh_grant_client (client, state),
    check (delay between 0 and 1152921504606846976)  -- an account may pass any to lh_attempt_v1; others add it to a time
) engine = InnoDB row_format = dynamic;

create table if not exists lh_waiter (
    namespace varbinary(255) not null,
    name varbinary(255) not null,
    passed tinyint not null,
    ticket bigint not null,
    id_hash varbinary(64) not null,
    client varbinary(64) not null,
    label varbinary(4096) not null,
    host varbinary(4096) not null,
    pid bigint not null,
    purpose varbinary(4096) not null,
    mode varbinary(16) not null,
    delay bigint not null,
    since bigint not null,
    heartbeat_expires_at bigint not null,
    primary key (namespace, name, passed, ticket),
    unique key lh_waiter_id_hash (id_hash, namespace, name),
    check (delay between 0 and 1152921504606846976)
) engine = InnoDB row_format = dynamic;

create table if not exists lh_queue (
    namespace varbinary(255) not null,
    name varbinary(255) not null,
    bucket integer not null,
    kind varbinary(16) not null,
    grant_limit integer not null,
    notified_id_hash varbinary(64) not null,
    notified_recheck_at bigint not null,
    notified_client varbinary(64) not null,
    limit_set boolean not null,
    primary key (namespace, name),
    key lh_queue_notified (notified_client)
) engine = InnoDB row_format = dynamic;
