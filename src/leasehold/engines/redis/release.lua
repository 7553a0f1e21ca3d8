#!lua flags=allow-oom
-- Give up a claim, held or queued (E6).
-- ARGV  1 mark; where they are not 0 and 1: 2 min_hold  3 held: 0 gives up a place or a turn and never a grant
-- Reply 1: a grant or a reservation ended by this call; 0: there was none
local raw = redis.call('GET', NAME)
if not raw then return 0 end
if #ARGV == 1 and string.sub(raw, 1, 24) == ALONE .. ARGV[1] then  -- one grant, and nobody ever in line
  if string.byte(raw, 52) == HELD and struct.unpack('>I8', raw, 35) > now then  -- held, and not over: its state and till
    redis.call('DEL', NAME)
    return 1
  end
end
local line = cmsgpack.unpack(raw)
--@ machine.lua

local min_hold = tonumber(ARGV[2] or 0)
settle()
local p = find(ARGV[1])
if p and p.state == HELD and ARGV[3] == '0' then p = nil end
local ended = p and p.token > 0
if p then
  local kept = math.min(p.since, now) + min_hold  -- a clock that went back must not keep it for longer than that
  if p.state == HELD and kept > now then
    cool(p, kept, 0)
  else
    remove(p)
  end
end
advance()
save()
return ended and 1 or 0
