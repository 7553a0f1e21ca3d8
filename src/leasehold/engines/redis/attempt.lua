#!lua
-- Acquire the name, or join its queue and stay in it (E1, E2, E3, E8).
-- ARGV  1 id hash  2 ttl  3 delay  4 queue: 1 or 0  5 semaphore_limit: 0 for a lock
--       6 the other fields of a grant, packed: state, shared, delay, slot, ticket, heartbeat_expires_at, client, holder
--       7 min_hold, if it is not 0
-- Reply {token, life, slot}     granted; slot -1: none
--       {0, left, position, token, holder, subscribed}   busy; left -1: nothing blocks the name; position -1: not
--                               queued; subscribed 0: the client's channel has no subscriber; 2: it has, and the claim
--                               is attempted again after RESERVATION_PROBE, even without a notification
--       {-1, semaphore_limit}   in use as another kind
local raw = redis.call('GET', NAME)
local id_hash, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not raw and ARGV[5] == '0' and not ARGV[7] then  -- no holder, no waiter. Commands format numbers slowly, so they get strings
  local token, last = now, redis.call('SET', COUNTER, string.format('%s%06d', time[1], time[2]), 'GET')
  if last and tonumber(last) >= now then  -- the clock went back: continue from the counter
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {id_hash, token, expires_at, since, ARGV[6]...}} as MessagePack: release_uncontended.lua compares
  -- its bytes.
  local grant = UNCONTENDED_PREFIX .. id_hash
    .. struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now) .. ARGV[6]
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl, -1}
end
local lock_state = raw and cmsgpack.unpack(raw)
local _, shared, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[6])
local reserved = lock_state and lock_state[6]
if reserved and #lock_state == 6 and reserved[1] == id_hash and reserved[5] == RESERVED and reserved[3] > now
  and reserved[6] == 0 and lock_state[1] == 0 and ARGV[5] == '0' and not reserved[14] and not ARGV[7]
  and now < lock_state[3] and now + ttl >= lock_state[5] then
  -- The only holder claims its exclusive reservation: no other claim is affected, and the head knows when to re-check.
  reserved[3], reserved[4], reserved[5], reserved[7] = now + ttl, now, HELD, delay
  reserved[10], reserved[11] = now + WAITER_TTL, client
  local keep_until = math.max(now + ttl + delay, now + QUEUE_TTL)
  redis.call('SET', NAME, cmsgpack.pack(lock_state), 'PXAT', string.format('%d', keep_until / 1000 + 2))
  return {reserved[2], ttl, -1}
end
--@ join_queue.lua
--@ lock_state.lua
--@ attempt_claim.lua

local grant, answer = attempt_claim({id_hash = id_hash, ttl = ttl, delay = delay, limit = tonumber(ARGV[5]),
  shared = shared, queue = ARGV[4] == '1', client = client, holder = holder, min_hold = tonumber(ARGV[7] or 0)})
return grant and {grant.token, answer, grant.slot} or answer
