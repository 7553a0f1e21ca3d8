#!lua flags=allow-oom
-- End the grant that has this token, whichever claim owns it, and notify its client. No later grant has that token.
-- ARGV  1 token
-- Reply 1: ended; 0: no such grant
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua
--@ end_claim.lua

local broken = break_grant(tonumber(ARGV[1]))
advance_queue()
save()
return broken and 1 or 0
