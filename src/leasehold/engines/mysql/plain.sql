-- The verbs as plain statements, one section each. {here} is the name; {enter}, {grant} and {settle} are the sections of
-- those names; the rest are values, written as literals, and {db}, the database.

-- :enter  lock the bucket, and only then read the clock (E1, E3)
insert into {db}.lh_bucket values ({namespace}, {bucket}, 0, 0, null) on duplicate key update ticket = lh_bucket.ticket;
set @lh_t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));

-- :idle  an attempt on a name that nobody wants, as most are; no row: somebody does, or did
start transaction;
{enter}
select not exists (select 1 from {db}.lh_grant where {here})
    and not exists (select 1 from {db}.lh_line where {here}) into @lh_free;
{grant}
select 1, token, {ttl}, null, null, null, null, null, null, null, null
    from {db}.lh_grant where {here} and mark = {mark} and @lh_free;
commit

-- :grant
update {db}.lh_bucket set token = greatest(token + 1, @lh_t)
    where namespace = {namespace} and bucket = {bucket} and @lh_free;
insert into {db}.lh_grant (
        namespace, name, token, bucket, mark, state, client, label, host, pid, purpose, mode, kind, most,
        delay, ticket, since, beat, until)
    select {namespace}, {name}, token, bucket, {mark}, 2, '', {label}, {host}, {pid}, {purpose},
        {mode}, {kind}, {most}, {delay}, 0, @lh_t, @lh_t + 15000000, @lh_t + {ttl}
    from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} and @lh_free;

-- :settle  a turn that was not taken in time becomes a place in line again; what else is over is removed. A transaction
-- that checked its lease may have the row: that is not waited for with the bucket locked, and goes on occupying the name
set @lh_over = null;
select token into @lh_over from {db}.lh_grant where {here} and if(state = 2, ends, until) <= @lh_t
    order by token desc limit 1 for update skip locked;
insert into {db}.lh_line select namespace, name, bucket, kind, most, '', 0, '' from {db}.lh_grant
    where {here} and token <= @lh_over and state = 1 and until <= @lh_t and beat > @lh_t
    on duplicate key update most = lh_line.most;
insert into {db}.lh_waiter
    select namespace, name, 1, ticket, mark, client, label, host, pid, purpose, mode, delay, since, beat
    from {db}.lh_grant where {here} and token <= @lh_over and state = 1 and until <= @lh_t and beat > @lh_t;
delete from {db}.lh_grant where {here} and token <= @lh_over and if(state = 2, ends, until) <= @lh_t;
delete from {db}.lh_waiter where {here} and beat <= @lh_t;
delete from {db}.lh_line where {here} and not exists (select 1 from {db}.lh_waiter where {here});

-- :attempt  it is ours already, or free for us, or we stand in line: then nobody is alone in this bucket (alone.sql)
start transaction;
{enter}
{settle}
set @lh_ticket = null;
select max(token) into @lh_mine from {db}.lh_grant
    where {here} and mark = {mark} and until > @lh_t and state in (1, 2);
select ticket into @lh_ticket from {db}.lh_waiter where mark = {mark} and {here};
select exists (select 1 from {db}.lh_grant where {here} and (kind <> {kind} or most <> {most}))
    or exists (select 1 from {db}.lh_line where {here} and (kind <> {kind} or most <> {most})) into @lh_other;
select not @lh_other and not exists (select 1 from {db}.lh_grant where {here}) and not exists (
    select 1 from {db}.lh_waiter where {here} and passed = 0 and mark <> {mark}
        and ticket < coalesce(@lh_ticket, 9223372036854775807)) into @lh_free;
set @lh_joins = {queue} and not @lh_free and not @lh_other and @lh_mine is null and @lh_ticket is null;
{grant}
update {db}.lh_grant set
        until = greatest(if(state = 1, @lh_t, until), @lh_t + {ttl}), since = if(state = 1, @lh_t, since),
        delay = {delay}, beat = @lh_t + 15000000, state = 2
    where {here} and token = @lh_mine;
update {db}.lh_bucket set ticket = ticket + 1, alone = null where namespace = {namespace} and bucket = {bucket} and @lh_joins;
insert into {db}.lh_line select {namespace}, {name}, {bucket}, {kind}, {most}, '', 0, '' from (select 1) once
    where @lh_joins on duplicate key update most = lh_line.most;
insert into {db}.lh_waiter
    select {namespace}, {name}, 0, ticket, {mark}, '', {label}, {host}, {pid}, {purpose}, {mode}, {delay},
        @lh_t, @lh_t + 15000000
    from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} and @lh_joins;
update {db}.lh_waiter set passed = 0, beat = @lh_t + 15000000, client = '' where mark = {mark} and {here};
delete from {db}.lh_waiter where mark = {mark} and {here} and @lh_free;
delete from {db}.lh_line where {here} and @lh_free and not exists (select 1 from {db}.lh_waiter where {here});
set @lh_ticket = null;
select ticket into @lh_ticket from {db}.lh_waiter where mark = {mark} and {here};
select count(*) into @lh_place from {db}.lh_waiter where {here} and passed = 0 and ticket < @lh_ticket;
select case when @lh_free or @lh_mine is not null then 1 when @lh_other then 2 else 0 end,
    g.token, if(g.until > @lh_t, g.until - @lh_t, 100000), null, if(@lh_ticket is null, null, @lh_place),
    g.label, g.host, g.pid, g.purpose, coalesce(g.kind, l.kind), coalesce(g.most, l.most)
    from (select 1) once left join {db}.lh_grant g on g.namespace = {namespace} and g.name = {name}
        left join {db}.lh_line l on l.namespace = {namespace} and l.name = {name}
    order by g.until, g.token limit 1;
commit

-- :sweep  a name with something over that nobody asked about; whoever has its bucket now sees to it himself
;
start transaction;
set @lh_t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
set @lh_n = null, @lh_in = null;
select namespace, bucket, name into @lh_ns, @lh_b, @lh_n from (
    (select namespace, bucket, name from {db}.lh_grant where ends <= @lh_t order by ends limit 1) union all
    (select l.namespace, l.bucket, l.name from {db}.lh_line l where {lines} and not exists (
        select 1 from {db}.lh_waiter w where w.namespace = l.namespace and w.name = l.name and w.beat > @lh_t)
        limit 1)) found limit 1;
select 1 into @lh_in from {db}.lh_bucket where namespace = @lh_ns and bucket = @lh_b for update skip locked;
set @lh_n = if(@lh_in, @lh_n, null);
{settle}
commit

-- :release
start transaction;
{enter}
select max(token), if(max(until) > @lh_t, 't', 'f') into @lh_mine, @lh_ended from {db}.lh_grant
    where {here} and mark = {mark} and (state = 1 or state = 2 and {held} and until > @lh_t);
update {db}.lh_grant set state = 3, delay = 0, until = least(since, @lh_t) + {min_hold}
    where {here} and token = @lh_mine and state = 2 and least(since, @lh_t) + {min_hold} > @lh_t;
delete from {db}.lh_grant where {here} and token = @lh_mine and state <> 3;
delete from {db}.lh_waiter where mark = {mark} and {here};
delete from {db}.lh_line where {here} and not exists (select 1 from {db}.lh_waiter where {here});
select @lh_ended;
commit

-- :break  what cools for a delay guards against a holder not yet told: a repeated break must not cut it short. The row
-- first, and then the bucket: a transaction that checked its lease may have it, and keeps nobody else waiting
start transaction;
set @lh_found = null;
select token into @lh_found from {db}.lh_grant where {here} and token = {token} and state <> 1 for update;
{enter}
select max(token) into @lh_found from {db}.lh_grant
    where {here} and token = {token} and until > @lh_t and (state = 2 or state = 3 and delay = 0);
update {db}.lh_grant set state = 3, until = @lh_t + delay
    where {here} and token = @lh_found and state = 2 and delay > 0;
delete from {db}.lh_grant where {here} and token = @lh_found and delay = 0;
select if(@lh_found is null, 'f', 't');
commit

-- :renew
start transaction;
set @lh_t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
{changes}
{answers};
commit

-- :change
update {db}.lh_grant set until = greatest(until, @lh_t + {ttl})
    where {here} and token = {token} and mark = {mark} and state = 2 and until > @lh_t;

-- :answer
select {nr}, max(if(until > @lh_t, until - @lh_t, null)), if(max(until) <= @lh_t, 't', 'f') from {db}.lh_grant
    where {here} and token = {token} and mark = {mark} and state = 2

-- :beat  the buckets are locked in one order by all who lock several
start transaction;
{buckets}
set @lh_t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));
{beats}
{answers};
commit

-- :bucket
select ticket into @lh_in from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} for update;

-- :keep
update {db}.lh_waiter set beat = @lh_t + 15000000 where mark = {mark} and {here} and beat > @lh_t;
update {db}.lh_grant set beat = @lh_t + 15000000 where {here} and mark = {mark} and state = 1 and beat > @lh_t;

-- :kept
select {nr}, if(exists (select 1 from {db}.lh_waiter where mark = {mark} and {here} and beat > @lh_t) or exists (
    select 1 from {db}.lh_grant where {here} and mark = {mark} and state in (1, 2) and if(state = 1, beat, until) > @lh_t
    ), 't', 'f'),
    if(exists (select 1 from {db}.lh_waiter me join {db}.lh_waiter f on f.namespace = me.namespace and f.name = me.name
        where me.mark = {mark} and me.namespace = {namespace} and me.name = {name} and me.passed = 0
            and f.passed = 0 and f.ticket < me.ticket), 't', 'f')

-- :inspect
select name, kind, most, state, token, concat(left(mark, 16), right(mark, 8)), label, host, pid, purpose, mode, delay,
    ticket, since, beat, until, slot, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
    from {db}.lh_grant where namespace = {namespace} and name >= {prefix}
        and (name = {prefix} or not {exact} and left(name, length({prefix})) = {prefix})
union all select w.name, l.kind, l.most, if(w.passed, 4, 0), 0, concat(left(w.mark, 16), right(w.mark, 8)), w.label, w.host,
    w.pid, w.purpose, w.mode, w.delay, w.ticket, w.since, w.beat, 0, null,
    timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
    from {db}.lh_waiter w join {db}.lh_line l using (namespace, name)
    where w.namespace = {namespace} and w.name >= {prefix}
        and (w.name = {prefix} or not {exact} and left(w.name, length({prefix})) = {prefix})
