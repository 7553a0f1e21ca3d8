#!lua flags=allow-oom
-- End this node's vote for the grant that has this token, whichever claim owns it, and notify its client. No later
-- grant has that token.
-- ARGV  1 token  2 id hash of the claim that has the token on other nodes, or ''; here it may have another, or wait
-- Reply id hash of the claim whose vote was ended; '': no such grant
local raw = redis.call('GET', NAME)
if not raw then return '' end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua
--@ end_claim.lua

local broken = break_grant(tonumber(ARGV[1]), ARGV[2])
local same_claim = ARGV[2] ~= '' and find(ARGV[2])
if same_claim and same_claim.state ~= HELD then remove(same_claim) end
advance_queue()
save()
return broken and broken.id_hash or ''
