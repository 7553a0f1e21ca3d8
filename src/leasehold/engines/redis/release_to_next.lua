-- The usual hand-off, without lock_state.lua: the only holder of a lock releases it, and the first waiter wants it for
-- itself. The same steps as `release_claim`, `advance_queue` and `save`. If any client is unreachable, any heartbeat is
-- overdue or it is time to scan the waiters, the script continues with lock_state, and nothing is changed yet.
local held = lock_state[6]
if #ARGV == 1 and #lock_state == 6 and lock_state[1] == 0 and now < lock_state[3]
  and held[1] == ARGV[1] and held[5] == HELD and held[3] > now and not held[14] then
  local id_hashes = redis.call('ZRANGE', QUEUE, '0', '1')
  local entries = id_hashes[1] and redis.call('HMGET', WAITERS, unpack(id_hashes)) or {}
  local first, second = entries[1] and cmsgpack.unpack(entries[1]), entries[2] and cmsgpack.unpack(entries[2])
  local has_second = id_hashes[2] ~= nil
  if first and first[6] == 0 and first[10] > now and (not has_second or second and second[10] > now) then
    local first_channel = CHANNEL .. first[11]
    local second_channel = has_second and CHANNEL .. second[11] or first_channel
    local subscribers = redis.call('PUBSUB', NUMSUB, first_channel, second_channel)
    if subscribers[2] > 0 and subscribers[4] > 0 then
      local token, last = now, redis.call('SET', COUNTER, string.format('%s%06d', time[1], time[2]), 'GET')
      if last and tonumber(last) >= now then  -- the clock went back: continue from the counter
        token = last + 1
        redis.call('SET', COUNTER, string.format('%d', token))
      end
      redis.call('ZREM', QUEUE, first[1])
      redis.call('HDEL', WAITERS, first[1])
      first[2], first[3], first[4], first[5], first[8] = token, now + RESERVATION, now, RESERVED, -1
      lock_state[6] = first
      redis.call(PUBLISH, first_channel, string.format('reserved 0 %s ', NAME) .. first[1])
      local recheck_at = now + RESERVATION_PROBE
      if has_second and (lock_state[4] ~= second[1] or recheck_at < lock_state[5]) then
        if second[3] > now and second[3] <= recheck_at then
          recheck_at = second[3]  -- by itself
        else
          redis.call(PUBLISH, second_channel, string.format('recheck %d %s ', RESERVATION_PROBE, NAME) .. second[1])
        end
        lock_state[4], lock_state[5] = second[1], recheck_at
      end
      redis.call('SET', NAME, cmsgpack.pack(lock_state), 'PXAT', string.format('%d', (now + QUEUE_TTL) / 1000 + 2))
      return 1
    end
  end
end
