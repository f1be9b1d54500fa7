-- Admits a request by all limits and counts it, or refuses it; returns the reply. The script has these functions of a limit: `read`
-- sets what was counted, and `met`; `wait_ms` gives the time until the request fits; `count` counts it, admitted or not; `rest` gives
-- the units that fit now, and the time until the whole limit is free.
local admitted = true
for n = 1, #limits do
  local limit = limits[n]
  read(limit)
  limit.wait_ms = wait_ms(limit)
  if limit.wait_ms > 0 then admitted = false end
end
local reply = { admitted and 1 or 0, now_ms }
for n = 1, #limits do
  local limit = limits[n]
  if admitted or count_rejected then
    count(limit, admitted)
    if limit.met < 2 then -- the key may be new
      redis.call('PEXPIRE', limit.current_key, string.format('%.0f', 2 * limit.window_ms - limit.at_ms))
    end
    limit.wait_ms = wait_ms(limit)
  end
  reply[4 * n - 1], reply[4 * n] = rest(limit)
  reply[4 * n + 1] = limit.wait_ms
  reply[4 * n + 2] = limit.met
end
return reply
