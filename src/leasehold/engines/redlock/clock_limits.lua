-- How far a node trusts a client's clock, which gives the proposed token and the ticket.
local DAY, MINUTE = 86400000000, 60000000
-- UNCONTENDED_PREFIX for an entry that has one field more, the number.
local UNCONTENDED_NUMBERED_PREFIX = string.sub(UNCONTENDED_PREFIX, 1, 6) .. '\157\176'

local function clamp_ticket(ticket)
  return math.max(math.min(ticket, now + MINUTE), now - MINUTE)
end

