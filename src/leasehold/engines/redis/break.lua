#!lua flags=allow-oom
-- End the grant that has this token, whoever owns it, and tell its owner. No successor has that token.
-- ARGV  1 token
-- Reply 1: ended; 0: no such grant
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local line = cmsgpack.unpack(raw)
--@ machine.lua

local token, broken = tonumber(ARGV[1]), 0
settle()
for _, p in ipairs(occupiers) do
  -- What cools for a delay guards against a holder not yet told: a repeated break must not cut it short.
  if p.token == token and (p.state == HELD or (p.state == COOLING and p.delay == 0)) then
    broken = 1
    if p.state == HELD then tell(p.client, 'lost', p.mark, 0) end
    if p.state == HELD and p.delay > 0 then
      cool(p, now + p.delay, p.delay)
    else
      vacate(p)
    end
    break
  end
end
advance()
save()
return broken
