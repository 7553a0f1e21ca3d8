#!lua
-- Get this node's vote for a name, or join its queue and stay in it (E1, E2, E8). The client derives the grant's token
-- from the tokens of all nodes (E3).
-- ARGV  1 id hash  2 number: of this request, and the token it proposes  3 ticket  4 ttl  5 delay  6 queue: 1 or 0
--       7 the other fields of a grant, packed: state, shared, delay, slot, ticket, heartbeat_expires_at, client, holder
--       8 min_hold, if it is not 0
-- Reply {token, life}   this node votes for the claim
--       {0, left, position, token, holder, subscribed, last}   busy; left -1: nothing blocks the name; position -1: not
--                        queued; subscribed 0: the client's channel has no subscriber; last: the highest queued ticket
--       {-1, semaphore_limit}   in use as a semaphore, by a client that uses this server alone
--@ node_preamble.lua
local raw = redis.call('GET', NAME)
local id_hash, number, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- A client's clock may be wrong. Tokens stay near this node's clock, since a node that lost its data restarts from it.
local proposal = math.min(number, now + MINUTE)
if not raw and not ARGV[8] then  -- no holder, no waiter
  local token = math.max(now, proposal)
  local last = redis.call('SET', COUNTER, string.format('%d', token), 'GET')
  if last and tonumber(last) >= token then
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {id_hash, token, expires_at, since, ARGV[7]..., number}} as MessagePack: release.lua compares its
  -- bytes.
  local times = struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now)
  local grant = UNCONTENDED_PREFIX .. id_hash .. times .. ARGV[7] .. struct.pack('>BI8', 207, number)
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl}
end
local lock_state = raw and cmsgpack.unpack(raw)
local _, _, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[7])
--@ lock_state.lua
--@ attempt_claim.lua

local grant, answer = attempt_claim({id_hash = id_hash, ttl = ttl, delay = delay, limit = 0, shared = 0,
  queue = ARGV[6] == '1', client = client, holder = holder, number = number, proposal = proposal,
  ticket = clamp_ticket(tonumber(ARGV[3])), min_hold = tonumber(ARGV[8] or 0)})
if grant then return {grant.token, answer} end
if answer[1] == 0 then answer[7] = tonumber(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0) end
return answer
