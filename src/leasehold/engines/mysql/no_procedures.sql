-- The verbs as plain statements, one section each. {here} is the condition for the name; {lock_bucket}, {grant},
-- {expire} and {drop_queue} are the sections of those names; {db} is the database; the rest are values, as literals.

-- :lock_bucket  lock the bucket, and only then read the clock (E1, E3)
insert into {db}.lh_bucket (namespace, bucket, token, ticket) values ({namespace}, {bucket}, 0, 0)
    on duplicate key update ticket = lh_bucket.ticket;
set @lh_now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));

-- :attempt_free  an attempt on an idle name, as most are; no row: the name has a grant or a queue
start transaction;
{lock_bucket}
select not exists (select 1 from {db}.lh_grant where {here})
    and not exists (select 1 from {db}.lh_queue where {here}) into @lh_free;
{grant}
select 1, token, {ttl}, null, null, null, null, null, null, null, null
    from {db}.lh_grant where {here} and id_hash = {id_hash} and @lh_free;
commit

-- :grant
update {db}.lh_bucket set token = greatest(token + 1, @lh_now)
    where namespace = {namespace} and bucket = {bucket} and @lh_free;
insert into {db}.lh_grant (
        namespace, name, token, bucket, id_hash, state, client, label, host, pid, purpose, mode, kind, grant_limit,
        delay, min_hold, ticket, since, heartbeat_expires_at, until)
    select {namespace}, {name}, token, bucket, {id_hash}, 2, '', {label}, {host}, {pid}, {purpose},
        {mode}, {kind}, {grant_limit}, {delay}, {min_hold}, 0, @lh_now, @lh_now + 15000000, @lh_now + {ttl}
    from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} and @lh_free;

-- :expire  turn unclaimed reservations back into queue positions, and remove everything else that is over. A row that a
-- transaction locked to check its lease is skipped, not waited for with the bucket locked: it keeps occupying the name
set @lh_expired_token = null;
select token into @lh_expired_token from {db}.lh_grant where {here} and if(state = 2, ends, until) <= @lh_now
    order by token desc limit 1 for update skip locked;
insert into {db}.lh_queue select namespace, name, bucket, kind, grant_limit, '', 0, '', false from {db}.lh_grant
    where {here} and token <= @lh_expired_token and state = 1 and until <= @lh_now and heartbeat_expires_at > @lh_now
    on duplicate key update grant_limit = lh_queue.grant_limit;
insert into {db}.lh_waiter
    select namespace, name, 1, ticket, id_hash, client, label, host, pid, purpose, mode, delay, since,
        heartbeat_expires_at
    from {db}.lh_grant
    where {here} and token <= @lh_expired_token and state = 1 and until <= @lh_now and heartbeat_expires_at > @lh_now;
delete from {db}.lh_grant where {here} and token <= @lh_expired_token and if(state = 2, ends, until) <= @lh_now;
delete from {db}.lh_waiter where {here} and heartbeat_expires_at <= @lh_now;
{drop_queue}

-- :drop_queue  the row of a queue without waiters, unless the limit in it counts
delete from {db}.lh_queue where {here} and not limit_set
    and not exists (select 1 from {db}.lh_waiter where {here})
    and not exists (select 1 from {db}.lh_grant g where {here} and g.grant_limit <> lh_queue.grant_limit);

-- :attempt  the claim has its grant, or the name is free for it, or it queues and sets sole_token null (fast_path.sql)
start transaction;
{lock_bucket}
{expire}
set @lh_ticket = null;
select max(token) into @lh_own_token from {db}.lh_grant
    where {here} and id_hash = {id_hash} and until > @lh_now and state in (1, 2);
select ticket into @lh_ticket from {db}.lh_waiter where id_hash = {id_hash} and {here};
select exists (select 1 from {db}.lh_grant where {here} and (kind <> {kind} or grant_limit <> {grant_limit}))
    or exists (select 1 from {db}.lh_queue where {here} and (kind <> {kind} or grant_limit <> {grant_limit}))
    into @lh_mismatch;
select not @lh_mismatch and not exists (select 1 from {db}.lh_grant where {here}) and not exists (
    select 1 from {db}.lh_waiter where {here} and passed = 0 and id_hash <> {id_hash}
        and ticket < coalesce(@lh_ticket, 9223372036854775807)) into @lh_free;
set @lh_joins = {queue} and not @lh_free and not @lh_mismatch and @lh_own_token is null and @lh_ticket is null;
{grant}
update {db}.lh_grant set
        until = greatest(if(state = 1, @lh_now, until), @lh_now + {ttl}), since = if(state = 1, @lh_now, since),
        delay = {delay}, min_hold = {min_hold}, heartbeat_expires_at = @lh_now + 15000000, state = 2
    where {here} and token = @lh_own_token;
update {db}.lh_bucket set ticket = ticket + 1, sole_token = null
    where namespace = {namespace} and bucket = {bucket} and @lh_joins;
insert into {db}.lh_queue
    select {namespace}, {name}, {bucket}, {kind}, {grant_limit}, '', 0, '', false from (select 1) one_row
    where @lh_joins on duplicate key update grant_limit = lh_queue.grant_limit;
insert into {db}.lh_waiter
    select {namespace}, {name}, 0, ticket, {id_hash}, '', {label}, {host}, {pid}, {purpose}, {mode}, {delay},
        @lh_now, @lh_now + 15000000
    from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} and @lh_joins;
update {db}.lh_waiter set passed = 0, heartbeat_expires_at = @lh_now + 15000000, client = ''
    where id_hash = {id_hash} and {here};
delete from {db}.lh_waiter where id_hash = {id_hash} and {here} and @lh_free;
{drop_queue}
set @lh_ticket = null;
select ticket into @lh_ticket from {db}.lh_waiter where id_hash = {id_hash} and {here};
select count(*) into @lh_queue_position from {db}.lh_waiter where {here} and passed = 0 and ticket < @lh_ticket;
select case when @lh_free or @lh_own_token is not null then 1 when @lh_mismatch then 2 else 0 end,
    g.token, if(g.until > @lh_now, g.until - @lh_now, 100000), null, if(@lh_ticket is null, null, @lh_queue_position),
    g.label, g.host, g.pid, g.purpose, coalesce(g.kind, l.kind), coalesce(l.grant_limit, g.grant_limit)
    from (select 1) one_row left join {db}.lh_grant g on g.namespace = {namespace} and g.name = {name}
        left join {db}.lh_queue l on l.namespace = {namespace} and l.name = {name}
    order by g.until, g.token limit 1;
commit

-- :sweep  expire one name that no client asks for any more; a locked bucket is skipped: its transaction does the same
;
start transaction;
set @lh_now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
set @lh_sweep_name = null, @lh_locked = null;
select namespace, bucket, name into @lh_sweep_namespace, @lh_sweep_bucket, @lh_sweep_name from (
    (select namespace, bucket, name from {db}.lh_grant where ends <= @lh_now order by ends limit 1) union all
    (select l.namespace, l.bucket, l.name from {db}.lh_queue l where {lines} and not exists (
        select 1 from {db}.lh_waiter w
        where w.namespace = l.namespace and w.name = l.name and w.heartbeat_expires_at > @lh_now)
        and (not l.limit_set or exists (
            select 1 from {db}.lh_waiter w where w.namespace = l.namespace and w.name = l.name))
        limit 1)) found limit 1;
select 1 into @lh_locked from {db}.lh_bucket
    where namespace = @lh_sweep_namespace and bucket = @lh_sweep_bucket for update skip locked;
set @lh_sweep_name = if(@lh_locked, @lh_sweep_name, null);
{expire}
commit

-- :release
start transaction;
{lock_bucket}
select max(token), if(max(until) > @lh_now, 't', 'f') into @lh_own_token, @lh_ended from {db}.lh_grant
    where {here} and id_hash = {id_hash} and (state = 1 or state = 2 and {held} and until > @lh_now);
update {db}.lh_grant set state = 3, delay = 0, until = least(since, @lh_now) + min_hold
    where {here} and token = @lh_own_token and state = 2 and {keep} and least(since, @lh_now) + min_hold > @lh_now;
delete from {db}.lh_grant where {here} and token = @lh_own_token and state <> 3;
delete from {db}.lh_waiter where id_hash = {id_hash} and {here};
{drop_queue}
select @lh_ended;
commit

-- :decline  end the reservation now: {expire} turns it back into a queue position, passed over
start transaction;
{lock_bucket}
select max(token) into @lh_own_token from {db}.lh_grant
    where {here} and id_hash = {id_hash} and state = 1 and client = {client} and until > @lh_now;
update {db}.lh_grant set until = @lh_now where {here} and token = @lh_own_token;
{expire}
select if(@lh_own_token is null, 'f', 't');
commit

-- :break  a grant cools for its delay because its holder may not know yet: a repeated break must not cut that short.
-- The row is locked before the bucket: a transaction that checked its lease may have it, and no other caller must wait
start transaction;
set @lh_found = null;
select token into @lh_found from {db}.lh_grant where {here} and token = {token} and state <> 1 for update;
{lock_bucket}
select max(token) into @lh_found from {db}.lh_grant
    where {here} and token = {token} and until > @lh_now and (state = 2 or state = 3 and delay = 0);
update {db}.lh_grant set state = 3, until = @lh_now + delay
    where {here} and token = @lh_found and state = 2 and delay > 0;
delete from {db}.lh_grant where {here} and token = @lh_found and delay = 0;
update {db}.lh_bucket set broken_tokens = substring_index(concat_ws(',', {token}, broken_tokens), ',', 16)
    where namespace = {namespace} and bucket = {bucket} and @lh_found is not null;
select if(@lh_found is null, 'f', 't');
commit

-- :renew
start transaction;
set @lh_now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
{changes}
{answers};
commit

-- :change
update {db}.lh_grant set until = greatest(until, @lh_now + {ttl})
    where {here} and token = {token} and id_hash = {id_hash} and state = 2 and until > @lh_now;

-- :answer
select {ordinal}, max(if(until > @lh_now, until - @lh_now, null)), case when max(until) <= @lh_now then 't' when exists (
        select 1 from {db}.lh_bucket
        where namespace = {namespace} and bucket = {bucket} and find_in_set({token}, broken_tokens) > 0)
        then 'b' else 'f' end
    from {db}.lh_grant where {here} and token = {token} and id_hash = {id_hash} and state = 2

-- :heartbeat  every call that locks several buckets locks them in the same order
start transaction;
{buckets}
set @lh_now = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
{beats}
{answers};
commit

-- :bucket
select ticket into @lh_locked from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} for update;

-- :heartbeat_update
update {db}.lh_waiter set heartbeat_expires_at = @lh_now + 15000000
    where id_hash = {id_hash} and {here} and heartbeat_expires_at > @lh_now;
update {db}.lh_grant set heartbeat_expires_at = @lh_now + 15000000
    where {here} and id_hash = {id_hash} and state = 1 and heartbeat_expires_at > @lh_now;

-- :heartbeat_answer
select {ordinal}, if(
        exists (select 1 from {db}.lh_waiter where id_hash = {id_hash} and {here} and heartbeat_expires_at > @lh_now)
        or exists (
            select 1 from {db}.lh_grant
            where {here} and id_hash = {id_hash} and state in (1, 2)
                and if(state = 1, heartbeat_expires_at, until) > @lh_now
        ), 't', 'f'),
    if(exists (select 1 from {db}.lh_waiter me join {db}.lh_waiter f on f.namespace = me.namespace and f.name = me.name
        where me.id_hash = {id_hash} and me.namespace = {namespace} and me.name = {name} and me.passed = 0
            and f.passed = 0 and f.ticket < me.ticket), 't', 'f')

-- :inspect
select g.name, g.kind, coalesce(q.grant_limit, g.grant_limit), g.state, g.token,
    concat(left(g.id_hash, 16), right(g.id_hash, 8)), g.label, g.host, g.pid, g.purpose, g.mode, g.delay, g.ticket,
    g.since, g.heartbeat_expires_at, g.until, g.slot, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
    from {db}.lh_grant g left join {db}.lh_queue q on q.namespace = g.namespace and q.name = g.name
    where g.namespace = {namespace} and g.name >= {prefix}
        and (g.name = {prefix} or not {exact} and left(g.name, length({prefix})) = {prefix})
union all select w.name, l.kind, l.grant_limit, if(w.passed, 4, 0), 0,
    concat(left(w.id_hash, 16), right(w.id_hash, 8)), w.label, w.host, w.pid, w.purpose, w.mode, w.delay, w.ticket,
    w.since, w.heartbeat_expires_at, 0, null, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
    from {db}.lh_waiter w join {db}.lh_queue l using (namespace, name)
    where w.namespace = {namespace} and w.name >= {prefix}
        and (w.name = {prefix} or not {exact} and left(w.name, length({prefix})) = {prefix})
