#!lua flags=allow-oom
-- Release a claim, held or queued (E6).
-- ARGV  1 id hash; unless they are 0 and 1: 2 min_hold  3 held: 0 ends a position or a reservation, never a grant
-- Reply 1: this call ended a grant or a reservation; 0: there was none
local raw = redis.call('GET', NAME)
if not raw then return 0 end
if #ARGV == 1 and string.sub(raw, 1, 24) == UNCONTENDED_PREFIX .. ARGV[1] then  -- one grant, and no claim ever queued
  if string.byte(raw, 52) == HELD and struct.unpack('>I8', raw, 35) > now then  -- state and expires_at of the grant
    redis.call('DEL', NAME)
    return 1
  end
end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua

local min_hold = tonumber(ARGV[2] or 0)
expire_holders()
local entry = find(ARGV[1])
if entry and entry.state == HELD and ARGV[3] == '0' then entry = nil end
local ended = entry and entry.token > 0
if entry then
  local hold_until = math.min(entry.since, now) + min_hold  -- if the clock went back, still no longer than min_hold
  if entry.state == HELD and hold_until > now then
    start_cooling(entry, hold_until, 0)
  else
    remove(entry)
  end
end
advance_queue()
save()
return ended and 1 or 0
