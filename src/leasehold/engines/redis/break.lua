#!lua flags=allow-oom
-- End the grant that has this token, whichever claim owns it, and notify its client. No later grant has that token.
-- ARGV  1 token
-- Reply 1: ended; 0: no such grant
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local lock_state = cmsgpack.unpack(raw)
--@ lock_state.lua

local token, broken = tonumber(ARGV[1]), 0
expire_holders()
for _, entry in ipairs(holders) do
  -- A delay protects against a holder that does not know of the break yet: a second break must not cut it short.
  if entry.token == token and (entry.state == HELD or (entry.state == COOLING and entry.delay == 0)) then
    broken = 1
    if entry.state == HELD then notify(entry.client, 'lost', entry.id_hash, 0) end
    if entry.state == HELD and entry.delay > 0 then
      start_cooling(entry, now + entry.delay, entry.delay)
    else
      remove_holder(entry)
    end
    break
  end
end
advance_queue()
save()
return broken
