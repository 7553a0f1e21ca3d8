-- The start of the scripts of a Redlock node. A node trusts a client's clock, which gives the proposed token and the
-- ticket, only so far.
local DAY, MINUTE = 86400000000, 60000000
-- An entry has one field more than with a single server: the number of the claim's last request.
UNCONTENDED_PREFIX = string.sub(UNCONTENDED_PREFIX, 1, 6) .. '\157\176'

local function clamp_ticket(ticket)
  return math.max(math.min(ticket, now + MINUTE), now - MINUTE)
end

