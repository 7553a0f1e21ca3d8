#!lua
-- Get this node's vote for a grant that has a majority, if this node lost it, never had it, or has it with another
-- token: see renew.py. If that is not possible, leave the queue: the claim no longer waits.
-- ARGV  1 id hash  2 number: of this request  3 token  4 valid_until: unless 0, refuse after this instant of this
--       server's clock  5 ttl  6 delay  7 queue: ignored here  8 the other fields of a grant, 9 min_hold: as in attempt.lua
-- Reply 1: this node votes for the claim; 0: another claim has the vote, or it is too late
local raw = redis.call('GET', NAME)
local lock_state, id_hash, number = raw and cmsgpack.unpack(raw), ARGV[1], tonumber(ARGV[2])
local token, valid_until, ttl, delay = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local _, _, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[8])
--@ lock_state.lua

expire_holders()
local existing = find(id_hash)
if semaphore_limit ~= 0 or (valid_until > 0 and now > valid_until)
  or (existing and (existing.number or 0) > number) then
  advance_queue()
  save()
  return 0
end
if existing then remove(existing) end
local first, done = holders[1], 0
if first and first.state == RESERVED then  -- the grant goes before this reservation: requeue the waiter
  remove_holder(first)
  first.state, first.token, first.expires_at = WAITING, 0, 0
  enqueue(first)
  write_waiter(first)
end
if #holders == 0 then
  local entry = {id_hash = id_hash, ticket = 0, shared = 0, delay = delay, heartbeat_expires_at = 0, client = client,
    holder = holder, number = number, min_hold = tonumber(ARGV[9] or 0)}
  make_holder(entry, HELD, now + ttl)
  if tonumber(redis.call('GET', COUNTER)) < token then redis.call('SET', COUNTER, format_integer(token)) end
  entry.token, done = token, 1
end
advance_queue()
save()
return done
