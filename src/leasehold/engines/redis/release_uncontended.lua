-- Release the grant of a name with one holder and never a queue, found by the first bytes of the name's value. If it is
-- not that simple, the script continues with lock_state.
local raw = redis.call('GET', NAME)
if not raw then
  redis.call('DEL', QUEUE, WAITERS)  -- a script that was refused a command half-way may have left them
  return 0
end
if #ARGV == 1 and string.sub(raw, 1, 24) == UNCONTENDED_PREFIX .. ARGV[1] then
  if string.byte(raw, 52) == HELD and struct.unpack('>I8', raw, 35) > now then  -- state and expires_at of the grant
    redis.call('DEL', NAME)
    return 1
  end
end
local lock_state = cmsgpack.unpack(raw)
