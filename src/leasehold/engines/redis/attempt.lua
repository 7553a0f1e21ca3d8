#!lua
-- Take the name, or join and keep its line (E1, E2, E3, E8).
-- ARGV  1 mark  2 ttl  3 delay  4 queue: 1 or 0  5 most: 0 for a lock, else the limit
--       6 terms: the rest of a grant as it is packed: state, shared, delay, slot, ticket, beat, client, holder
-- Reply {token, life, slot}     granted; slot -1: none
--       {0, left, place, token, holder, heard}   busy: left -1: nothing is in the way; place -1: not in line;
--                                                heard 0: nobody listens on the client's channel
--       {-1, most}              in use as another kind
local raw = redis.call('GET', NAME)
local mark, ttl, delay = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not raw and ARGV[5] == '0' then  -- nobody holds, nobody waits. Commands print numbers slowly: strings are handed to them
  local token, last = now, redis.call('SET', COUNTER, string.format('%s%06d', time[1], time[2]), 'GET')
  if last and tonumber(last) >= now then  -- the clock went back: the counter goes on from where it was
    token = last + 1
    redis.call('SET', COUNTER, token)
  end
  -- {0, 0, 0, '', 0, {mark, token, till, since, terms...}} as MessagePack, which release.lua knows by its bytes.
  local grant = ALONE .. mark .. struct.pack('>BI8BI8BI8', 207, token, 207, now + ttl, 207, now) .. ARGV[6]
  redis.call('SET', NAME, grant, 'PXAT', string.format('%d', (now + ttl + delay) / 1000 + 2))
  return {token, ttl, -1}
end
local line = raw and cmsgpack.unpack(raw)
local limit = tonumber(ARGV[5])
local _, shared, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[6])
--@ machine.lua

local function busy(p)
  local front = first_end()
  local where = p and place(p) or -1
  local heard = (not p or reachable(p.client)) and 1 or 0
  save()
  if not front then return {0, -1, where, 0, '', heard} end
  local ends = where == 0 and look_at() or front.till
  return {0, ends - now, where, front.token, front.holder, heard}
end

local function join()  -- a new party, not yet in line: as one passed over, it takes its place by what comes next
  if not head() and redis.call('EXISTS', WAITERS) == 0 then scan_at = now + BEAT end
  return {mark = mark, state = PASSED, token = 0, till = 0, since = now, shared = shared, delay = delay, slot = -1,
    ticket = 0, beat = now + BEAT, client = client, holder = holder}
end

settle()
if limit ~= most then
  scan()  -- the dead do not fix a kind
  if not idle() then
    save()
    return {-1, most}
  end
  most = limit
end
local p = find(mark)
if not p then
  advance()
  p = join()
  if not head() and fits(shared) then
    occupy(p, HELD, now + ttl)
    save()
    return {p.token, ttl, p.slot}
  end
  if ARGV[4] == '0' then return busy() end
  tickets = tickets + 1
  p.ticket = tickets
end
p.beat, p.client = now + BEAT, client
if p.state == PASSED then
  p.state = WAITING
  queue(p)
end
if p.state == WAITING then
  keep(p)
  advance(p)
end
if p.state == WAITING then return busy(p) end
if p.state == RESERVED then p.state, p.since, p.till = HELD, now, now end  -- claimed: its life starts at this request
p.delay = delay
local life = extend(p, ttl)
advance()
save()
return {p.token, life, p.slot}
