-- inbound_counter.lua: admit and count a visitor's request, or refuse it, by two fixed windows, the previous one weighted.
--
-- Guarantee: one atomic step over all limits of a rule: all of them count the request, or none. The units of the previous window
-- are weighted by its part within the last window_ms, as if its requests had come evenly. Memory: one small number for each
-- identity, limit and window. Rules I1 to I5 in docs/inbound-algorithms.md.
--
-- KEYS  for each limit: its hash of the current window, then its hash of the previous window. A hash has the units of all
--       identities of a shard, by their names in that window. All keys are in one slot of a cluster
-- ARGV  1 now_ms          0 = the server's clock
--       2 cost            units of this request
--       3 count_rejected  1 = a rejected request counts too; else 0
--       then for each limit, in the order of KEYS:
--         number          units per window; number * window_ms is at most 2^52
--         window_ms
--         burst           0; only gcra has a burst
--         window          the current window's number: now_ms / window_ms, rounded down
--         name            of the identity in the current window: any bytes, usually 8
--         previous_name   of the identity in the previous window
--
-- Reply { outcome, now_ms, (remaining, reset_ms, retry_after_ms, met) for each limit }, all whole numbers
--       outcome           1 = admitted, 0 = rejected, -1 = the window has ended, and nothing was counted: call again with the
--                         windows of now_ms (the reply has no more)
--       remaining         units that fit now
--       reset_ms          until the whole limit is free, if no other request comes
--       retry_after_ms    until the same request fits again, if no other request comes; 0 if it fits now
--       met               which window had this identity before: 2 = the current, 1 = only the previous, 0 = neither

-- @include parts/clock.lua
-- @include parts/inbound_limits.lua

local function read(limit)
  local current = redis.call('HGET', limit.current_key, limit.name)
  local previous = redis.call('HGET', limit.previous_key, limit.previous_name)
  limit.met = current and 2 or previous and 1 or 0
  limit.current, limit.previous = tonumber(current or 0), tonumber(previous or 0)
end

local function wait_ms(limit)
  local window_ms, at_ms = limit.window_ms, limit.at_ms
  local free = limit.number - limit.current - cost
  if free >= 0 then
    if limit.previous * (window_ms - at_ms) <= free * window_ms then return 0 end
    return window_ms - at_ms - math.floor(free * window_ms / limit.previous)
  end
  -- The current window alone is too full. It fits at the earliest in the next window, when this is the previous.
  return window_ms - at_ms + window_ms - math.floor((limit.number - cost) * window_ms / limit.current)
end

local function count(limit)
  -- Rejected requests count only as far as Lua computes exactly.
  local units = math.min(cost, math.floor(MAX_SCALE / limit.window_ms) - limit.current)
  limit.current = limit.current + units
  redis.call('HINCRBY', limit.current_key, limit.name, units == cost and ARGV[2] or string.format('%.0f', units))
end

local function rest(limit)
  local weighted = math.ceil(limit.previous * (limit.window_ms - limit.at_ms) / limit.window_ms)
  local windows = limit.current > 0 and 2 or limit.previous > 0 and 1 or 0
  local reset_ms = windows > 0 and windows * limit.window_ms - limit.at_ms or 0
  return math.max(limit.number - limit.current - weighted, 0), reset_ms
end

-- @include parts/inbound_decide.lua
