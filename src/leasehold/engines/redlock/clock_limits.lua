-- How far a client's clock is believed: what it proposes for a token, and when it says that it came.
local DAY, MINUTE = 86400000000, 60000000
local UNCONTENDED_NUMBERED_PREFIX = string.sub(UNCONTENDED_PREFIX, 1, 6) .. '\157\176'  -- ALONE, of a party that has a number as well

local function clamp_ticket(ticket)
  return math.max(math.min(ticket, now + MINUTE), now - MINUTE)
end

