#!lua flags=allow-oom
-- End this node's vote for the grant that has this token, whichever claim owns it, and notify its client. No later
-- grant has that token.
-- ARGV  1 token  2 id hash of the claim that has the token on other nodes, or ''; here it may have another, or wait
-- Reply id hash of the claim whose vote was ended; '': no such grant
local raw = redis.call('GET', NAME)
if not raw then return '' end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua

local token, broken = tonumber(ARGV[1]), ''
expire_holders()
for _, entry in ipairs(holders) do
  local matches = entry.token == token or entry.id_hash == ARGV[2]
  -- A delay protects against a holder that does not know of the break yet: a second break must not cut it short.
  if matches and (entry.state == HELD or (entry.state == COOLING and entry.delay == 0)) then
    broken = entry.id_hash
    if entry.state == HELD then notify(entry.client, 'lost', entry.id_hash, 0) end
    if entry.state == HELD and entry.delay > 0 then
      start_cooling(entry, now + entry.delay, entry.delay)
    else
      remove_holder(entry)
    end
    break
  end
end
local same_claim = ARGV[2] ~= '' and find(ARGV[2])
if same_claim and same_claim.state ~= HELD then remove(same_claim) end
advance_queue()
save()
return broken
