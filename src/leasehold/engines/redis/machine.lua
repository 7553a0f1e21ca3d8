-- The line of one name: core/admission.py, function by function, over keys. Included by the scripts after their fast
-- paths, with `line` as it stands in the second key; a script is one atomic step of the server, so nothing here can be
-- overtaken.
--
-- COUNTER   the bucket's last token: never expires, never falls (E3)
-- NAME      everything that occupies the name, and what is known of its line, packed: see `save`
-- QUEUE     sorted set: the marks of those who wait, by ticket
-- WAITERS   hash: mark -> packed party, of all who wait and all who were passed over
--
-- Times are microseconds of the server's clock. A key lives at least as long as anything in it, the name as long as its
-- waiters: no name, nothing at all. What is told is published at once: the script is over before anybody reads it.
-- `now` stands before every script, and words in capitals for what they mean: scripts.py.

line = line or {0, 0, 0, '', 0}
-- most 0: a lock, else a semaphore's limit; scan_at 0: nobody has waited yet
local most, tickets, scan_at, told, told_at = line[1], line[2], line[3], line[4], line[5]
local occupiers, owners, changed = {}, {}, false  -- owners: by mark; what cools has none
-- What was asked of the server is not asked again in the same step, and numbers are handed to it printed: calls, and
-- printing floats, are what a script spends its time on.
local top, heard = nil, {}  -- top: the head of the line, false: there is none, nil: not known; heard: by client

local function whole(number)
  return string.format('%d', number)
end

local function millis(micros)  -- when a key that must live until then may go
  return whole(math.ceil(micros / 1000) + 1)
end

local function party(p)
  return {mark = p[1], token = p[2], till = p[3], since = p[4], state = p[5], shared = p[6], delay = p[7], slot = p[8],
    ticket = p[9], beat = p[10], client = p[11], holder = p[12], number = p[13]}
end

local function packed(p)
  return {p.mark, p.token, p.till, p.since, p.state, p.shared, p.delay, p.slot, p.ticket, p.beat, p.client, p.holder,
    p.number}  -- of a redlock's request; a plain server has none
end

for n = 6, #line do
  local p = party(line[n])
  occupiers[n - 5] = p
  if p.state ~= COOLING then owners[p.mark] = p end
end

-- ------------------------------------------------------------------ telling

local function reachable(client)
  if heard[client] == nil then heard[client] = redis.call('PUBSUB', NUMSUB, CHANNEL .. client)[2] > 0 end
  return heard[client]
end

local function tell(client, kind, mark, after)
  redis.call(PUBLISH, CHANNEL .. client, string.format('%s %d %s ', kind, after, NAME) .. mark)
end

-- ------------------------------------------------------------- who is where

local function waiter(mark)
  local found = redis.call('HGET', WAITERS, mark)
  return found and party(cmsgpack.unpack(found))
end

local function keep(p)
  redis.call('HSET', WAITERS, p.mark, cmsgpack.pack(packed(p)))
  redis.call('PEXPIREAT', WAITERS, millis(now + KEPT))
  changed = true
end

local function find(mark)
  return owners[mark] or waiter(mark)
end

local function head()  -- first in line; a mark without a party is what an eviction left
  while top == nil do
    local mark = redis.call('ZRANGE', QUEUE, '0', '0')[1]
    if not mark then
      top = false
    else
      top = waiter(mark)
      if not top then redis.call('ZREM', QUEUE, mark) top = nil end
    end
  end
  return top
end

local function queue(p)
  local first = head()
  redis.call('ZADD', QUEUE, whole(p.ticket), p.mark)
  redis.call('PEXPIREAT', QUEUE, millis(now + KEPT))
  if not first or first.ticket >= p.ticket then top = nil end  -- else it stands behind a head that is known
end

local function place(p)
  return redis.call('ZCOUNT', QUEUE, '-inf', string.format('(%d', p.ticket))
end

local function idle()
  return #occupiers == 0 and redis.call('EXISTS', WAITERS) == 0
end

local function fits(shared)
  if #occupiers == 0 then return true end
  if most > 0 then return #occupiers < most end
  if shared == 0 then return false end
  for _, p in ipairs(occupiers) do
    if p.shared == 0 then return false end
  end
  return true
end

-- ------------------------------------------------------------- transitions

local function vacate(p)
  for n, other in ipairs(occupiers) do
    if other == p then table.remove(occupiers, n) break end
  end
  if owners[p.mark] == p then owners[p.mark] = nil end
  changed = true
end

local function leave(p)
  top = nil
  redis.call('ZREM', QUEUE, p.mark)
  redis.call('HDEL', WAITERS, p.mark)
  changed = true
end

local function remove(p)
  if p.token > 0 then vacate(p) else leave(p) end
end

local function pass_over(p)  -- keeps its ticket, and comes back at its old place
  if p.token > 0 then vacate(p) else redis.call('ZREM', QUEUE, p.mark) end
  top = nil
  p.state, p.token, p.slot = PASSED, 0, -1
  keep(p)
end

local function cool(p, till, delay)  -- takes the owner from what it held; the place stays taken until then
  p.state, p.till, p.delay, owners[p.mark], changed = COOLING, till, delay, nil, true
end

local function free_slot()
  local taken = {}
  for _, p in ipairs(occupiers) do taken[p.slot] = true end
  local slot = 0
  while taken[slot] do slot = slot + 1 end
  return slot
end

local function occupy(p, state, till)
  local token = math.max(tonumber(redis.call('GET', COUNTER) or 0) + 1, now)
  redis.call('SET', COUNTER, whole(token))
  if p.ticket > 0 then leave(p) end
  p.slot = most > 0 and free_slot() or -1
  p.state, p.token, p.till, p.since, changed = state, token, till, now, true
  occupiers[#occupiers + 1], owners[p.mark] = p, p
end

local function extend(p, ttl)  -- never back: whoever trusts an earlier answer is not overtaken (E8)
  changed = true
  if now + ttl < p.till then return p.till - now end
  p.till = now + ttl
  return ttl
end

-- --------------------------------------------------------------- decisions

local function scan()  -- drop the places of those not heard of; rare: a dead head is also met in `advance`
  scan_at, changed = now + BEAT, true
  local all = redis.call('HGETALL', WAITERS)
  for n = 2, #all, 2 do
    local p = party(cmsgpack.unpack(all[n]))
    if p.beat <= now then leave(p) end
  end
  redis.call('PEXPIREAT', QUEUE, millis(now + KEPT))
  redis.call('PEXPIREAT', WAITERS, millis(now + KEPT))
end

local function settle()  -- end every occupation that is over by now; nothing is decided before this has run
  if scan_at > 0 and now >= scan_at then scan() end
  for n = #occupiers, 1, -1 do
    local p = occupiers[n]
    if p.till <= now then
      if p.state == HELD and p.till + p.delay > now then
        cool(p, p.till + p.delay, p.delay)
      elseif p.state == RESERVED and p.beat > now then
        pass_over(p)
      else
        vacate(p)
      end
    end
  end
end

local function first_end()
  local found
  for _, p in ipairs(occupiers) do
    if not found or p.till < found.till then found = p end
  end
  return found
end

local function pass_over_silent(asking)  -- those who died after they were given their turn; one that asks lives
  local silent = {}
  for _, p in ipairs(occupiers) do
    if p.state == RESERVED and p ~= asking and not reachable(p.client) then silent[#silent + 1] = p end
  end
  for _, p in ipairs(silent) do pass_over(p) end
  return #silent > 0
end

local function look_at()  -- when the head has to look: at the first end, or soon if one given a turn may have died
  local soonest = first_end().till
  for _, p in ipairs(occupiers) do
    if p.state == RESERVED then return math.min(soonest, now + PROBE) end
  end
  return soonest
end

local function tell_when_to_look(first, asks)
  local at = look_at()
  if asks then  -- its own answer tells it
    told, told_at, changed = first.mark, at, true
  elseif told ~= first.mark or at < told_at then
    tell(first.client, 'head', first.mark, at - now)
    told, told_at, changed = first.mark, at, true
  end
end

local function advance(asking)  -- reserve for the head of the line while it fits; then see that the new head knows when to look
  while true do
    local first = head()
    if not first then return end
    local asks = asking ~= nil and first.mark == asking.mark
    if asks then first = asking end
    if not asks and first.beat <= now then
      leave(first)
    elseif not asks and not reachable(first.client) then
      pass_over(first)
    elseif fits(first.shared) then
      occupy(first, RESERVED, now + RESERVATION)
      if not asks then tell(first.client, 'go', first.mark, 0) end
    elseif not pass_over_silent(asking) then
      return tell_when_to_look(first, asks)
    end
  end
end

local function save()
  if not changed then return end
  local until_, waits = 0, top or redis.call('EXISTS', WAITERS) == 1
  for n, p in ipairs(occupiers) do
    line[n + 5] = packed(p)
    local last = p.state == HELD and p.till + p.delay or math.max(p.till, p.beat)
    until_ = math.max(until_, last)
  end
  if waits then
    until_ = math.max(until_, now + KEPT)
  elseif #occupiers == 0 then
    return redis.call('DEL', NAME, QUEUE)
  end
  line[1], line[2], line[3], line[4], line[5] = most, tickets, scan_at, told, told_at
  for n = #line, #occupiers + 6, -1 do line[n] = nil end
  redis.call('SET', NAME, cmsgpack.pack(line), 'PXAT', millis(until_))
end
