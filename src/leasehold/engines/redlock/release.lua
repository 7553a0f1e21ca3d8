#!lua flags=allow-oom
-- Give up this node's part of a claim, held or queued (E6), or put it back in line.
-- ARGV  1 mark; where they are not 0, 1, 0 and 0:  2 min_hold  3 held: 0 gives up a place or a turn and never a grant
--       4 upto: unless 0, leave alone what a request with a higher number has asked for since
--       5 ticket: unless 0, put it back in line by this
-- Reply 1: a grant or a reservation ended by this call; 2: and this claim has the turn here; 0: there was none
--@ clock_limits.lua
local raw = redis.call('GET', NAME)
if not raw then return 0 end
if #ARGV == 1 and string.sub(raw, 1, 24) == UNCONTENDED_NUMBERED_PREFIX .. ARGV[1] then  -- one grant, and nobody ever in line
  if string.byte(raw, 52) == HELD and struct.unpack('>I8', raw, 35) > now then  -- held, and not over: its state and till
    redis.call('DEL', NAME)
    return 1
  end
end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua

local min_hold, max_number, ticket = tonumber(ARGV[2] or 0), tonumber(ARGV[4] or 0), tonumber(ARGV[5] or 0)
expire_holders()
local entry = find(ARGV[1])
if entry and entry.state == HELD and ARGV[3] == '0' then entry = nil end
if entry and max_number > 0 and (entry.number or 0) > max_number then entry = nil end
local ended = entry and entry.token > 0
if entry and ticket > 0 then
  if ended then
    remove_holder(entry)
    if not head() and redis.call('EXISTS', WAITERS) == 0 then next_waiter_scan = now + WAITER_TTL end
    entry.state, entry.token, entry.slot, entry.ticket, entry.heartbeat_expires_at, last_ticket = WAITING, 0, -1, clamp_ticket(ticket), now + WAITER_TTL, 1
    enqueue(entry)
    write_waiter(entry)
  end
elseif entry then
  local hold_until = math.min(entry.since, now) + min_hold  -- a clock that went back must not keep it for longer than that
  if entry.state == HELD and hold_until > now then
    start_cooling(entry, hold_until, 0)
  else
    remove(entry)
  end
end
advance_queue(ticket > 0 and entry or nil)
save()
return ended and (ticket > 0 and entry.state == RESERVED and 2 or 1) or 0
