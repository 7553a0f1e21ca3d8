#!lua flags=allow-oom
-- Refuse a reservation whose client cannot be notified: pass the claim over and reserve for the next waiter, unless
-- another client serves the claim by now. Never ends a grant. For both engines.
-- ARGV  1 id hash  2 client
-- Reply 1: the reservation was passed on; 0: there was none
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua

expire_holders()
local entry = holders_by_hash[ARGV[1]]
local declined = entry and entry.state == RESERVED and entry.client == ARGV[2]
if declined then pass_over(entry) end
advance_queue()
save()
return declined and 1 or 0
