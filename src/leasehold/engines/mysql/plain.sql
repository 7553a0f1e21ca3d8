-- The verbs as plain statements, one section each. {here} is the name, {enter} the section of that name; the rest are
-- values, written as literals, and {db}, the database.

-- :enter  lock the bucket, and only then read the clock (E1, E3)
start transaction;
insert into {db}.lh_bucket values ({namespace}, {bucket}, 0, 0) on duplicate key update ticket = lh_bucket.ticket;
set @lh_t = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));

-- :attempt  what is over is removed; then it is ours already, or free, or busy
{enter}
delete from {db}.lh_grant where {here} and ends <= @lh_t and (state <> 1 or beat <= @lh_t);
select max(token) into @lh_mine from {db}.lh_grant where {here} and mark = {mark} and state = 2 and until > @lh_t;
select not exists (select 1 from {db}.lh_grant where {here})
    and not exists (select 1 from {db}.lh_waiter where {here} and beat > @lh_t) into @lh_free;
update {db}.lh_bucket set token = greatest(token + 1, @lh_t)
    where namespace = {namespace} and bucket = {bucket} and @lh_free;
insert into {db}.lh_grant (
        namespace, name, token, bucket, mark, state, client, label, host, pid, purpose, mode, kind, most,
        delay, ticket, since, beat, until)
    select {namespace}, {name}, token, bucket, {mark}, 2, '', {label}, {host}, {pid}, {purpose},
        {mode}, {kind}, {most}, {delay}, 0, @lh_t, @lh_t + 15000000, @lh_t + {ttl}
    from {db}.lh_bucket where namespace = {namespace} and bucket = {bucket} and @lh_free;
update {db}.lh_grant set until = greatest(until, @lh_t + {ttl}), delay = {delay} where {here} and token = @lh_mine;
select case when @lh_free or @lh_mine is not null then 1 when g.kind <> {kind} or g.most <> {most} then 2 else 0 end,
    g.token, if(g.until > @lh_t, g.until - @lh_t, 100000), null, null, g.label, g.host, g.pid, g.purpose, g.kind, g.most
    from (select 1) once left join {db}.lh_grant g on g.namespace = {namespace} and g.name = {name}
    order by g.until, g.token limit 1;
commit

-- :release
{enter}
select max(token) into @lh_mine from {db}.lh_grant
    where {here} and mark = {mark} and until > @lh_t and (state = 1 or state = 2 and {held});
update {db}.lh_grant set state = 3, delay = 0, until = least(since, @lh_t) + {min_hold}
    where {here} and token = @lh_mine and state = 2 and least(since, @lh_t) + {min_hold} > @lh_t;
delete from {db}.lh_grant where {here} and token = @lh_mine and state <> 3;
delete from {db}.lh_waiter where {here} and mark = {mark};
select if(@lh_mine is null, 'f', 't');
commit

-- :break  what cools for a delay guards against a holder not yet told: a repeated break must not cut it short
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

-- :inspect
select name, kind, most, state, token, concat(left(mark, 16), right(mark, 8)), label, host, pid, purpose, mode, delay,
    ticket, since, beat, until, slot, timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
    from {db}.lh_grant where namespace = {namespace} and name >= {prefix}
        and (name = {prefix} or not {exact} and left(name, length({prefix})) = {prefix})
