#!lua
-- Acquire the name, or join its queue and stay in it (E1, E2, E3, E8).
-- ARGV  1 id hash  2 ttl  3 delay  4 queue: 1 or 0  5 semaphore_limit: 0 for a lock
--       6 the other fields of a grant, packed: state, shared, delay, slot, ticket, heartbeat_expires_at, client, holder
-- Reply {token, life, slot}     granted; slot -1: none
--       {0, left, position, token, holder, subscribed}   busy; left -1: nothing blocks the name; position -1: not
--                               queued; subscribed 0: the client's channel has no subscriber
--       {-1, semaphore_limit}   in use as another kind
local raw = redis.call('GET', NAME)
local id_hash, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not raw and ARGV[5] == '0' then  -- no holder, no waiter. Commands format numbers slowly, so they get strings
  local token, last = now, redis.call('SET', COUNTER, string.format('%s%06d', time[1], time[2]), 'GET')
  if last and tonumber(last) >= now then  -- the clock went back: continue from the counter
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {id_hash, token, expires_at, since, ARGV[6]...}} as MessagePack: release.lua compares its bytes.
  local grant = UNCONTENDED_PREFIX .. id_hash
    .. struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now) .. ARGV[6]
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl, -1}
end
local lock_state = raw and cmsgpack.unpack(raw)
local limit = tonumber(ARGV[5])
local _, shared, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[6])
--@ lock_state.lua

local function busy(entry)
  local first_ending = first_to_expire()
  local position = entry and position_of(entry) or -1
  local subscribed = (not entry or is_reachable(entry.client)) and 1 or 0
  save()
  if not first_ending then return {0, -1, position, 0, '', subscribed} end
  local next_attempt_at = position == 0 and recheck_at() or first_ending.expires_at
  return {0, next_attempt_at - now, position, first_ending.token, first_ending.holder, subscribed}
end

local function new_entry()  -- not queued yet: in state PASSED, so that the code below enqueues it
  if not head() and redis.call('EXISTS', WAITERS) == 0 then next_waiter_scan = now + WAITER_TTL end
  return {id_hash = id_hash, state = PASSED, token = 0, expires_at = 0, since = now, shared = shared, delay = delay,
    slot = -1, ticket = 0, heartbeat_expires_at = now + WAITER_TTL, client = client, holder = holder}
end

expire_holders()
if limit ~= semaphore_limit then
  expire_waiters()  -- dead waiters must not keep the name's kind
  if not is_idle() then
    save()
    return {-1, semaphore_limit}
  end
  semaphore_limit = limit
end
local entry = find(id_hash)
if not entry then
  advance_queue()
  entry = new_entry()
  if not head() and can_admit(shared) then
    make_holder(entry, HELD, now + ttl)
    save()
    return {entry.token, ttl, entry.slot}
  end
  if ARGV[4] == '0' then return busy() end
  last_ticket = last_ticket + 1
  entry.ticket = last_ticket
end
entry.heartbeat_expires_at, entry.client = now + WAITER_TTL, client
if entry.state == PASSED then
  entry.state = WAITING
  enqueue(entry)
end
if entry.state == WAITING then
  write_waiter(entry)
  advance_queue(entry)
end
if entry.state == WAITING then return busy(entry) end
if entry.state == RESERVED then  -- claimed: its ttl starts at this request
  entry.state, entry.since, entry.expires_at = HELD, now, now
end
entry.delay = delay
local life = extend(entry, ttl)
advance_queue()
save()
return {entry.token, life, entry.slot}
