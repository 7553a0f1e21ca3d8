#!lua
-- Take this node's part of a name, or join and keep its line (E1, E2, E8). The tokens of all nodes make the grant's (E3).
-- ARGV  1 mark  2 number: of this request, the token proposed  3 ticket  4 ttl  5 delay  6 queue: 1 or 0
--       7 terms: the rest of a grant as it is packed: state, shared, delay, slot, ticket, beat, client, holder
-- Reply {token, life}   this node's part is taken
--       {0, left, place, token, holder, heard, last}   busy: left -1: nothing is in the way; place -1: not in line;
--                        heard 0: nobody listens on the client's channel; last: the highest ticket in line
--       {-1, most}       in use as another kind, by a client of this server alone
--@ limits.lua
local raw = redis.call('GET', NAME)
local mark, number, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- A client's clock may be anything: tokens stay near this one, from which a node that forgets has to go on.
local proposal = math.min(number, now + MINUTE)
if not raw then  -- nobody holds, nobody waits
  local token = math.max(now, proposal)
  local last = redis.call('SET', COUNTER, string.format('%d', token), 'GET')
  if last and tonumber(last) >= token then
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {mark, token, till, since, terms..., number}} as MessagePack, which release.lua knows by its bytes.
  local times = struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now)
  local grant = LONE .. mark .. times .. ARGV[7] .. struct.pack('>BI8', 207, number)
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl}
end
local line = cmsgpack.unpack(raw)
local _, _, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[7])
--@ machine.lua

local function busy(p)
  local front = first_end()
  local where = p and place(p) or -1
  local heard = (not p or reachable(p.client)) and 1 or 0
  local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
  save()
  if not front then return {0, -1, where, 0, '', heard, tonumber(last)} end
  local ends = where == 0 and look_at() or front.till
  return {0, ends - now, where, front.token, front.holder, heard, tonumber(last)}
end

settle()
if most ~= 0 then
  scan()  -- the dead do not fix a kind
  if not idle() then
    save()
    return {-1, most}
  end
  most = 0
end
local p = find(mark)
if not p then
  advance()
  if not head() and redis.call('EXISTS', WAITERS) == 0 then scan_at = now + BEAT end
  p = {mark = mark, state = PASSED, token = 0, till = 0, since = now, shared = 0, delay = delay, slot = -1,
    ticket = clamped(tonumber(ARGV[3])), beat = now + BEAT, client = client, holder = holder, number = number}
  if not head() and fits(0) then
    occupy(p, RESERVED, now)
  elseif ARGV[6] == '0' then
    return busy()
  end
  tickets = 1  -- somebody has been in line: the fast path of a release is not for this name
end
p.beat, p.client, p.number = now + BEAT, client, math.max(p.number or 0, number)
if p.state == PASSED then
  p.state = WAITING
  queue(p)
end
if p.state == WAITING then
  keep(p)
  advance(p)
end
if p.state == WAITING then return busy(p) end
if p.state == RESERVED then  -- claimed: its life starts at this request, and so does its token
  local token = math.max(tonumber(redis.call('GET', COUNTER)) + 1, now, proposal)
  redis.call('SET', COUNTER, whole(token))
  p.state, p.since, p.till, p.token = HELD, now, now, token
end
p.delay = delay
local life = extend(p, ttl)
advance()
save()
return {p.token, life}
