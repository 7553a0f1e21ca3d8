#!lua flags=allow-oom
-- Give up this node's part of a claim, held or queued (E6), or put it back in line.
-- ARGV  1 mark; where they are not 0, 1, 0 and 0:  2 min_hold  3 held: 0 gives up a place or a turn and never a grant
--       4 upto: unless 0, leave alone what a request with a higher number has asked for since
--       5 ticket: unless 0, put it back in line by this
-- Reply 1: a grant or a reservation ended by this call; 2: and this claim has the turn here; 0: there was none
--@ limits.lua
local raw = redis.call('GET', NAME)
if not raw then return 0 end
if #ARGV == 1 and string.sub(raw, 1, 24) == LONE .. ARGV[1] then  -- one grant, and nobody ever in line
  if string.byte(raw, 52) == HELD and struct.unpack('>I8', raw, 35) > now then  -- held, and not over: its state and till
    redis.call('DEL', NAME)
    return 1
  end
end
local line = cmsgpack.unpack(raw)
--@ machine.lua

local min_hold, upto, ticket = tonumber(ARGV[2] or 0), tonumber(ARGV[4] or 0), tonumber(ARGV[5] or 0)
settle()
local p = find(ARGV[1])
if p and p.state == HELD and ARGV[3] == '0' then p = nil end
if p and upto > 0 and (p.number or 0) > upto then p = nil end
local ended = p and p.token > 0
if p and ticket > 0 then
  if ended then
    vacate(p)
    if not head() and redis.call('EXISTS', WAITERS) == 0 then scan_at = now + BEAT end
    p.state, p.token, p.slot, p.ticket, p.beat, tickets = WAITING, 0, -1, clamped(ticket), now + BEAT, 1
    queue(p)
    keep(p)
  end
elseif p then
  local kept = math.min(p.since, now) + min_hold  -- a clock that went back must not keep it for longer than that
  if p.state == HELD and kept > now then
    cool(p, kept, 0)
  else
    remove(p)
  end
end
advance(ticket > 0 and p or nil)
save()
return ended and (ticket > 0 and p.state == RESERVED and 2 or 1) or 0
