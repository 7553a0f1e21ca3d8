-- How a claim ends by a release or a break: for both engines (E6).

local function release_claim(entry, keep)  -- keep: for the rest of the grant's min_hold
  -- If the clock went back, still no longer than min_hold.
  local hold_until = keep and math.min(entry.since, now) + entry.min_hold or now
  if entry.state == HELD and hold_until > now then
    start_cooling(entry, hold_until, 0)
  else
    remove(entry)
  end
end

local function break_grant(token, id_hash)  -- whichever claim owns it; id_hash, unless nil: a grant that has it, too
  expire_holders()
  for _, entry in ipairs(holders) do
    local matches = entry.token == token or entry.id_hash == id_hash
    -- A delay protects against a holder that does not know of the break yet: a second break must not cut it short.
    if matches and (entry.state == HELD or (entry.state == COOLING and entry.delay == 0)) then
      if entry.state == HELD then notify(entry.client, 'broken', entry.id_hash, 0) end
      if entry.state == HELD and entry.delay > 0 then
        start_cooling(entry, now + entry.delay, entry.delay)
      else
        remove_holder(entry)
      end
      return entry
    end
  end
end
