#!lua
-- Get this node's vote for a name, or join its queue and stay in it (E1, E2, E8). The client derives the grant's token
-- from the tokens of all nodes (E3).
-- ARGV  1 id hash  2 number: of this request, and the token it proposes  3 ticket  4 ttl  5 delay  6 queue: 1 or 0
--       7 the other fields of a grant, packed: state, shared, delay, slot, ticket, heartbeat_expires_at, client, holder
-- Reply {token, life}   this node votes for the claim
--       {0, left, position, token, holder, subscribed, last}   busy; left -1: nothing blocks the name; position -1: not
--                        queued; subscribed 0: the client's channel has no subscriber; last: the highest queued ticket
--       {-1, semaphore_limit}   in use as a semaphore, by a client that uses this server alone
--@ clock_limits.lua
local raw = redis.call('GET', NAME)
local id_hash, number, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- A client's clock may be wrong. Tokens stay near this node's clock, since a node that lost its data restarts from it.
local proposal = math.min(number, now + MINUTE)
if not raw then  -- no holder, no waiter
  local token = math.max(now, proposal)
  local last = redis.call('SET', COUNTER, string.format('%d', token), 'GET')
  if last and tonumber(last) >= token then
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {id_hash, token, expires_at, since, ARGV[7]..., number}} as MessagePack: release.lua compares its
  -- bytes.
  local times = struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now)
  local grant = UNCONTENDED_NUMBERED_PREFIX .. id_hash .. times .. ARGV[7] .. struct.pack('>BI8', 207, number)
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl}
end
local lock_state = cmsgpack.unpack(raw)
local _, _, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[7])
--@ lock_state.lua

local function busy(entry)
  local first_ending = first_to_expire()
  local position = entry and position_of(entry) or -1
  local subscribed = (not entry or is_reachable(entry.client)) and 1 or 0
  local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
  save()
  if not first_ending then return {0, -1, position, 0, '', subscribed, tonumber(last)} end
  local next_attempt_at = position == 0 and recheck_at() or first_ending.expires_at
  return {0, next_attempt_at - now, position, first_ending.token, first_ending.holder, subscribed, tonumber(last)}
end

expire_holders()
if semaphore_limit ~= 0 then
  expire_waiters()  -- dead waiters must not keep the name's kind
  if not is_idle() then
    save()
    return {-1, semaphore_limit}
  end
  semaphore_limit = 0
end
local entry = find(id_hash)
if not entry then
  advance_queue()
  if not head() and redis.call('EXISTS', WAITERS) == 0 then next_waiter_scan = now + WAITER_TTL end
  entry = {id_hash = id_hash, state = PASSED, token = 0, expires_at = 0, since = now, shared = 0, delay = delay,
    slot = -1, ticket = clamp_ticket(tonumber(ARGV[3])), heartbeat_expires_at = now + WAITER_TTL, client = client,
    holder = holder, number = number}
  if not head() and can_admit(0) then
    make_holder(entry, RESERVED, now)
  elseif ARGV[6] == '0' then
    return busy()
  end
  last_ticket = 1  -- a claim was queued: the fast path of release.lua no longer applies to this name
end
entry.heartbeat_expires_at, entry.client, entry.number = now + WAITER_TTL, client, math.max(entry.number or 0, number)
if entry.state == PASSED then
  entry.state = WAITING
  enqueue(entry)
end
if entry.state == WAITING then
  write_waiter(entry)
  advance_queue(entry)
end
if entry.state == WAITING then return busy(entry) end
if entry.state == RESERVED then  -- claimed: its ttl starts at this request, and it gets a new token
  local token = math.max(tonumber(redis.call('GET', COUNTER)) + 1, now, proposal)
  redis.call('SET', COUNTER, format_integer(token))
  entry.state, entry.since, entry.expires_at, entry.token = HELD, now, now, token
end
entry.delay = delay
local life = extend(entry, ttl)
advance_queue()
save()
return {entry.token, life}
