#!lua flags=allow-oom
-- Push back the end of grants, and keep places in line, of one name (E5, E7). A full server must not cost leases.
-- ARGV  for each claim: mark, token (0: queued), ttl
-- Reply for each claim two numbers: life (-1: unknown, -2: lapsed) and place (-1: it does not wait)
local raw = redis.call('GET', NAME)
local line = raw and cmsgpack.unpack(raw)
if raw and #ARGV == 3 and #line == 6 and line[2] == 0 then  -- one grant, and nobody ever in line
  local p = line[6]
  if p[1] == ARGV[1] and p[2] == tonumber(ARGV[2]) and p[3] > now and p[5] == HELD then
    local till = now + tonumber(ARGV[3])
    if till > p[3] then p[3] = till end
    redis.call('SET', NAME, cmsgpack.pack(line), 'PXAT', math.ceil((p[3] + p[7]) / 1000) + 1)
    return {p[3] - now, -1}
  end
end
--@ machine.lua

local lapsed = {}
for _, p in ipairs(occupiers) do
  if p.state == HELD and p.till <= now then lapsed[p.mark] = true end
end
settle()
advance()
local answers = {}
for n = 1, #ARGV, 3 do
  local mark, token = ARGV[n], tonumber(ARGV[n + 1])
  local p = find(mark)
  local life, where = -1, -1
  if not p then
    life = lapsed[mark] and -2 or -1
  elseif token == 0 then  -- the heart-beat alone: it lengthens no reservation and puts nobody back in line
    p.beat, changed = now + BEAT, true
    if p.token == 0 then keep(p) end
    life, where = BEAT, p.state == WAITING and place(p) or -1
  elseif p.state == HELD and p.token == token then
    life = extend(p, tonumber(ARGV[n + 2]))
  end
  answers[#answers + 1] = life
  answers[#answers + 1] = where
end
save()
return answers
