#!lua flags=allow-oom
-- Release a claim, held or queued (E6).
-- ARGV  1 id hash; then, only if one of them is 0:
--       2 keep: 0 if min_hold does not apply  3 held: 0 ends a position or a reservation, never a grant
-- Reply 1: this call ended a grant or a reservation; 0: there was none
--@ release_uncontended.lua
--@ release_to_next.lua
--@ lock_state.lua
--@ end_claim.lua

expire_holders()
local entry = find(ARGV[1])
if entry and entry.state == HELD and ARGV[3] == '0' then entry = nil end
local ended = entry and entry.token > 0
if entry then release_claim(entry, ARGV[2] ~= '0') end
advance_queue()
save()
return ended and 1 or 0
