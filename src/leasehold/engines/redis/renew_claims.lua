-- Renew the claims that begin at ARGV[first]: id hash, token (0: queued), ttl of each. For both engines (E5, E7).
-- number: of this request, with Redlock. Returns for each claim two numbers: life (-1: unknown, -2: expired) and
-- position (-1: not waiting).

local function renew_claims(first, number)
  local expired = {}
  for _, entry in ipairs(holders) do
    if entry.state == HELD and entry.expires_at <= now then expired[entry.id_hash] = true end
  end
  expire_holders()
  advance_queue()
  local answers = {}
  for n = first, #ARGV, 3 do
    local id_hash, token = ARGV[n], tonumber(ARGV[n + 1])
    local entry = find(id_hash)
    local life, position = expired[id_hash] and -2 or -1, -1
    local renewed = entry and (token == 0 or (entry.state == HELD and entry.token == token))
    if renewed and number then entry.number = math.max(entry.number or 0, number) end
    if renewed and token == 0 then  -- only a heartbeat: it extends no reservation and requeues no entry
      entry.heartbeat_expires_at, changed = now + WAITER_TTL, true
      if entry.token == 0 then write_waiter(entry) end
      life, position = WAITER_TTL, entry.state == WAITING and position_of(entry) or -1
    elseif renewed then
      life = extend(entry, tonumber(ARGV[n + 2]))
    end
    answers[#answers + 1] = life
    answers[#answers + 1] = position
  end
  save()
  return answers
end
