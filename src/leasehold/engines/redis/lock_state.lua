-- The state of one name: core/lock_state.py, function by function, over keys. Scripts include this file after their
-- fast paths, with `lock_state` as unpacked from the second key. A script is one atomic step of the server, so no other
-- client acts in between.
--
-- COUNTER   the bucket's last token: never expires, never falls (E3)
-- NAME      the holders of the name and the state of its queue, packed: see `save`
-- QUEUE     sorted set: the id hashes of waiters, by ticket
-- WAITERS   hash: id hash -> packed entry, of waiters and of entries that were passed over. `expires_at` of a waiter:
--           when it re-checks by itself, so that it need not be notified if it is the head by then; 0: only if notified
--
-- Times are microseconds of the server's clock. A key lives at least as long as anything in it, and NAME as long as its
-- waiters, or without end if it has a limit that was set: without NAME there is nothing at all. Notifications are
-- published at once: the script ends before a client reads them. scripts.py puts `now` before every script and replaces
-- the words in capitals.

lock_state = lock_state or {0, 0, 0, '', 0}
-- semaphore_limit   0: the name is a lock; stored as less than 0: the limit was set (`set_limit.lua`)
-- next_waiter_scan  0: no claim has waited yet
local semaphore_limit, last_ticket, next_waiter_scan, notified_head, notified_recheck_at =
  math.abs(lock_state[1]), lock_state[2], lock_state[3], lock_state[4], lock_state[5]
local limit_set = lock_state[1] < 0
local holders, holders_by_hash, changed = {}, {}, false  -- the claim of a cooling entry has ended: not in the second
-- A script spends its time on calls to the server and on formatting floats. So its answers are kept until the script
-- ends, and numbers are passed to it as strings.
local cached_head, reachable_by_client = nil, {}  -- cached_head false: the queue is empty; nil: not read yet
local queue_was_empty = false  -- a waiter that joins it creates its keys

local function format_integer(number)
  return string.format('%d', number)
end

local function key_expiry_millis(micros)  -- PXAT of a key that must live until then
  return format_integer(math.ceil(micros / 1000) + 1)
end

local function unpack_entry(entry)
  return {id_hash = entry[1], token = entry[2], expires_at = entry[3], since = entry[4], state = entry[5],
    shared = entry[6], delay = entry[7], slot = entry[8], ticket = entry[9], heartbeat_expires_at = entry[10],
    client = entry[11], holder = entry[12], number = entry[13], min_hold = entry[14] or 0}
end

local function pack_entry(entry)  -- number: only with Redlock; min_hold: only if there is one
  local has_min_hold = entry.min_hold > 0
  return {entry.id_hash, entry.token, entry.expires_at, entry.since, entry.state, entry.shared, entry.delay, entry.slot,
    entry.ticket, entry.heartbeat_expires_at, entry.client, entry.holder,
    entry.number or has_min_hold and 0 or nil, has_min_hold and entry.min_hold or nil}
end

for n = 6, #lock_state do
  local entry = unpack_entry(lock_state[n])
  holders[n - 5] = entry
  if entry.state ~= COOLING then holders_by_hash[entry.id_hash] = entry end
end

-- ----------------------------------------------------------- notifications

local function is_reachable(client)
  if reachable_by_client[client] == nil then
    reachable_by_client[client] = redis.call('PUBSUB', NUMSUB, CHANNEL .. client)[2] > 0
  end
  return reachable_by_client[client]
end

local function notify(client, kind, id_hash, after)
  redis.call(PUBLISH, CHANNEL .. client, string.format('%s %d %s ', kind, after, NAME) .. id_hash)
end

-- ----------------------------------------------------------------- entries

local function read_waiter(id_hash)
  local found = redis.call('HGET', WAITERS, id_hash)
  return found and unpack_entry(cmsgpack.unpack(found))
end

local function write_waiter(entry)
  redis.call('HSET', WAITERS, entry.id_hash, cmsgpack.pack(pack_entry(entry)))
  -- `expire_waiters` prolongs the keys' life while there are waiters; only a new key has no end yet.
  if queue_was_empty or entry.state == PASSED then
    redis.call('PEXPIREAT', WAITERS, key_expiry_millis(now + QUEUE_TTL))
  end
  changed = true
end

local function find(id_hash)
  return holders_by_hash[id_hash] or read_waiter(id_hash)
end

local function head()  -- the first waiter; an eviction may leave an id hash without its entry
  while cached_head == nil do
    local id_hash = redis.call('ZRANGE', QUEUE, '0', '0')[1]
    if not id_hash then
      cached_head = false
    else
      cached_head = read_waiter(id_hash)
      if not cached_head then redis.call('ZREM', QUEUE, id_hash) cached_head = nil end
    end
  end
  return cached_head
end

local function enqueue(entry)
  local first = head()
  redis.call('ZADD', QUEUE, format_integer(entry.ticket), entry.id_hash)
  if not first then
    queue_was_empty = true
    redis.call('PEXPIREAT', QUEUE, key_expiry_millis(now + QUEUE_TTL))
  end
  if not first or first.ticket >= entry.ticket then cached_head = nil end  -- else the known head remains
end

local function position_of(entry)
  return redis.call('ZCOUNT', QUEUE, '-inf', string.format('(%d', entry.ticket))
end

local function is_idle()
  return #holders == 0 and redis.call('EXISTS', WAITERS) == 0
end

local function can_admit(shared)
  if #holders == 0 then return true end
  if semaphore_limit > 0 then return #holders < semaphore_limit end
  if shared == 0 then return false end
  for _, entry in ipairs(holders) do
    if entry.shared == 0 then return false end
  end
  return true
end

-- ------------------------------------------------------------- transitions

local function remove_holder(entry)
  for n, other in ipairs(holders) do
    if other == entry then table.remove(holders, n) break end
  end
  if holders_by_hash[entry.id_hash] == entry then holders_by_hash[entry.id_hash] = nil end
  changed = true
end

local function remove_waiter(entry)
  cached_head = nil
  redis.call('ZREM', QUEUE, entry.id_hash)
  redis.call('HDEL', WAITERS, entry.id_hash)
  changed = true
end

local function remove(entry)
  if entry.token > 0 then remove_holder(entry) else remove_waiter(entry) end
end

local function pass_over(entry)  -- the entry keeps its ticket, and so its position when it comes back
  if entry.token > 0 then remove_holder(entry) else redis.call('ZREM', QUEUE, entry.id_hash) end
  cached_head = nil
  entry.state, entry.token, entry.slot, entry.expires_at = PASSED, 0, -1, 0
  write_waiter(entry)
end

local function start_cooling(entry, expires_at, delay)  -- the claim ends, but its entry blocks the name until then
  entry.state, entry.expires_at, entry.delay, holders_by_hash[entry.id_hash], changed =
    COOLING, expires_at, delay, nil, true
end

local function free_slot()
  local taken = {}
  for _, entry in ipairs(holders) do taken[entry.slot] = true end
  local slot = 0
  while taken[slot] do slot = slot + 1 end
  return slot
end

local function make_holder(entry, state, expires_at)
  local token = math.max(tonumber(redis.call('GET', COUNTER) or 0) + 1, now)
  redis.call('SET', COUNTER, format_integer(token))
  if entry.ticket > 0 then remove_waiter(entry) end
  entry.slot = semaphore_limit > 0 and free_slot() or -1
  entry.state, entry.token, entry.expires_at, entry.since, changed = state, token, expires_at, now, true
  holders[#holders + 1], holders_by_hash[entry.id_hash] = entry, entry
end

local function extend(entry, ttl)  -- never shortens: the holder may trust an earlier answer (E8)
  changed = true
  if now + ttl < entry.expires_at then return entry.expires_at - now end
  entry.expires_at = now + ttl
  return ttl
end

-- --------------------------------------------------------------- decisions

local function expire_waiters()  -- drops waiters without a heartbeat; rare: `advance_queue` also drops a dead head
  next_waiter_scan, changed = now + WAITER_TTL, true
  local all = redis.call('HGETALL', WAITERS)
  for n = 2, #all, 2 do
    local entry = unpack_entry(cmsgpack.unpack(all[n]))
    if entry.heartbeat_expires_at <= now then remove_waiter(entry) end
  end
  redis.call('PEXPIREAT', QUEUE, key_expiry_millis(now + QUEUE_TTL))
  redis.call('PEXPIREAT', WAITERS, key_expiry_millis(now + QUEUE_TTL))
end

local function expire_holders()  -- ends every grant and reservation that has expired; runs before any decision
  if next_waiter_scan > 0 and now >= next_waiter_scan then expire_waiters() end
  for n = #holders, 1, -1 do
    local entry = holders[n]
    if entry.expires_at <= now then
      if entry.state == HELD and entry.expires_at + entry.delay > now then
        start_cooling(entry, entry.expires_at + entry.delay, entry.delay)
      elseif entry.state == RESERVED and entry.heartbeat_expires_at > now then
        pass_over(entry)
      else
        remove_holder(entry)
      end
    end
  end
end

local function first_to_expire()
  local found
  for _, entry in ipairs(holders) do
    if not found or entry.expires_at < found.expires_at then found = entry end
  end
  return found
end

local function pass_over_unreachable(attempting)  -- reserved entries whose clients died; an attempting client is alive
  local unreachable = {}
  for _, entry in ipairs(holders) do
    if entry.state == RESERVED and entry ~= attempting and not is_reachable(entry.client) then
      unreachable[#unreachable + 1] = entry
    end
  end
  for _, entry in ipairs(unreachable) do pass_over(entry) end
  return #unreachable > 0
end

local function recheck_at()  -- when the head re-checks: at the first expiry, or soon if a reserved waiter may be dead
  local soonest = first_to_expire().expires_at
  for _, entry in ipairs(holders) do
    if entry.state == RESERVED then return math.min(soonest, now + RESERVATION_PROBE) end
  end
  return soonest
end

local function notify_recheck(first, is_attempting)
  local at = recheck_at()
  if is_attempting then  -- the reply of this script tells it
    notified_head, notified_recheck_at, changed = first.id_hash, at, true
  elseif notified_head ~= first.id_hash or at < notified_recheck_at then
    if first.expires_at > now and first.expires_at <= at then
      at = first.expires_at  -- by itself
    else
      notify(first.client, 'recheck', first.id_hash, at - now)
    end
    notified_head, notified_recheck_at, changed = first.id_hash, at, true
  end
end

-- Reserve for the head of the queue while it can be admitted; then notify the new head when to re-check.
local function advance_queue(attempting)
  while true do
    local first = head()
    if not first then return end
    local is_attempting = attempting ~= nil and first.id_hash == attempting.id_hash
    if is_attempting then first = attempting end
    if not is_attempting and first.heartbeat_expires_at <= now then
      remove_waiter(first)
    elseif not is_attempting and not is_reachable(first.client) then
      pass_over(first)
    elseif can_admit(first.shared) then
      make_holder(first, RESERVED, now + RESERVATION)
      if not is_attempting then notify(first.client, 'reserved', first.id_hash, 0) end
    elseif not pass_over_unreachable(attempting) then
      return notify_recheck(first, is_attempting)
    end
  end
end

local function head_knows(expires_at)  -- behind an exclusive grant, which admits no other claim, it need know no more
  return notified_recheck_at <= expires_at and (not head() or head().id_hash == notified_head)
end

local function save()
  if not changed then return end
  local keep_until, has_waiters = 0, cached_head or redis.call('EXISTS', WAITERS) == 1
  for n, entry in ipairs(holders) do
    lock_state[n + 5] = pack_entry(entry)
    local entry_keep_until = entry.state == HELD and entry.expires_at + entry.delay
      or math.max(entry.expires_at, entry.heartbeat_expires_at)
    keep_until = math.max(keep_until, entry_keep_until)
  end
  if has_waiters then
    keep_until = math.max(keep_until, now + QUEUE_TTL)
  elseif #holders == 0 and not limit_set then
    return redis.call('DEL', NAME, QUEUE)
  end
  lock_state[1], lock_state[2], lock_state[3], lock_state[4], lock_state[5] =
    limit_set and -semaphore_limit or semaphore_limit, last_ticket, next_waiter_scan, notified_head, notified_recheck_at
  for n = #lock_state, #holders + 6, -1 do lock_state[n] = nil end
  if limit_set then return redis.call('SET', NAME, cmsgpack.pack(lock_state)) end
  redis.call('SET', NAME, cmsgpack.pack(lock_state), 'PXAT', key_expiry_millis(keep_until))
end
