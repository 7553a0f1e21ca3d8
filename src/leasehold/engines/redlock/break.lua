#!lua flags=allow-oom
-- End this node's part of the grant that has this token, whoever owns it, and tell its owner. No successor has it.
-- ARGV  1 token  2 mark: of the claim known to have it elsewhere, which may have another here, or wait; or nothing
-- Reply the mark of what was ended; nothing: no such grant
local raw = redis.call('GET', NAME)
if not raw then return '' end
local line = cmsgpack.unpack(raw)
--@ machine.lua

local token, broken = tonumber(ARGV[1]), ''
settle()
for _, p in ipairs(occupiers) do
  local named = p.token == token or p.mark == ARGV[2]
  -- What cools for a delay guards against a holder not yet told: a repeated break must not cut it short.
  if named and (p.state == HELD or (p.state == COOLING and p.delay == 0)) then
    broken = p.mark
    if p.state == HELD then tell(p.client, 'lost', p.mark, 0) end
    if p.state == HELD and p.delay > 0 then
      cool(p, now + p.delay, p.delay)
    else
      vacate(p)
    end
    break
  end
end
local rest = ARGV[2] ~= '' and find(ARGV[2])
if rest and rest.state ~= HELD then remove(rest) end
advance()
save()
return broken
