#!lua flags=allow-oom
-- Push back the end of grants, and keep places in line, of one name (E5, E7). A full server must not cost leases.
-- ARGV  1 number: of this request; then for each claim: mark, token (0: queued), ttl
-- Reply for each claim two numbers: life (-1: unknown, -2: lapsed) and place (-1: it does not wait); then the time here
local raw = redis.call('GET', NAME)
local line, number = raw and cmsgpack.unpack(raw), tonumber(ARGV[1])
--@ machine.lua

local lapsed = {}
for _, p in ipairs(occupiers) do
  if p.state == HELD and p.till <= now then lapsed[p.mark] = true end
end
settle()
advance()
local answers = {}
for n = 2, #ARGV, 3 do
  local mark, token = ARGV[n], tonumber(ARGV[n + 1])
  local p = find(mark)
  local life, where = lapsed[mark] and -2 or -1, -1
  if p and token == 0 then  -- the heart-beat alone: it lengthens no reservation and puts nobody back in line
    p.beat, p.number, changed = now + BEAT, math.max(p.number or 0, number), true
    if p.token == 0 then keep(p) end
    life, where = BEAT, p.state == WAITING and place(p) or -1
  elseif p and p.state == HELD and p.token == token then
    p.number = math.max(p.number or 0, number)
    life = extend(p, tonumber(ARGV[n + 2]))
  end
  answers[#answers + 1] = life
  answers[#answers + 1] = where
end
save()
answers[#answers + 1] = now
return answers
