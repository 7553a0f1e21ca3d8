#!lua flags=allow-oom
-- Renew the grants and the queued claims of one name (E5, E7). allow-oom: a full server must not cost leases.
-- ARGV  1 number: of this request; then for each claim: id hash, token (0: queued), ttl
-- Reply for each claim two numbers: life (-1: unknown, -2: expired) and position (-1: not waiting); then this server's
--       clock
local raw = redis.call('GET', NAME)
local lock_state, number = raw and cmsgpack.unpack(raw), tonumber(ARGV[1])
--@ lock_state.lua

local expired = {}
for _, entry in ipairs(holders) do
  if entry.state == HELD and entry.expires_at <= now then expired[entry.id_hash] = true end
end
expire_holders()
advance_queue()
local answers = {}
for n = 2, #ARGV, 3 do
  local id_hash, token = ARGV[n], tonumber(ARGV[n + 1])
  local entry = find(id_hash)
  local life, position = expired[id_hash] and -2 or -1, -1
  if entry and token == 0 then  -- only a heartbeat: it extends no reservation and requeues no entry
    entry.heartbeat_expires_at, entry.number, changed = now + WAITER_TTL, math.max(entry.number or 0, number), true
    if entry.token == 0 then write_waiter(entry) end
    life, position = WAITER_TTL, entry.state == WAITING and position_of(entry) or -1
  elseif entry and entry.state == HELD and entry.token == token then
    entry.number = math.max(entry.number or 0, number)
    life = extend(entry, tonumber(ARGV[n + 2]))
  end
  answers[#answers + 1] = life
  answers[#answers + 1] = position
end
save()
answers[#answers + 1] = now
return answers
