-- inbound_gcra.lua: admit and count a visitor's request, or refuse it, evenly spaced except for a burst (generic cell rate
-- algorithm).
--
-- Guarantee: one atomic step over all limits of a rule: all of them count the request, or none. A limit lets `burst` units
-- come at once, and gives them back evenly, `number` per window. Memory: one number for each identity, limit and window.
-- Rules I1 to I5 in docs/inbound-algorithms.md.
--
-- KEYS, ARGV and reply are those of inbound_counter.lua, but burst is 1 to number, and cost is at most burst. A hash has for
-- each identity the time at which all units are free again, in 1/number ms since the window began: a unit takes window_ms of
-- these. The time is packed into as few bytes as it needs, highest first: as text it would take twice the memory.

-- @include parts/clock.lua
-- @include parts/inbound_limits.lua

local function pack(n)
  local size = 1
  while n >= 256 ^ size do size = size + 1 end
  return struct.pack('>I' .. size, n)
end
local function unpack_state(text) return (struct.unpack('>I' .. #text, text)) end

for n = 1, #limits do
  if limits[n].burst == 0 then return redis.error_reply('ERR inbound_gcra.lua: burst is a whole number from 1 to number') end
end

-- `free_at` is at least now, and at most one burst ahead, although a stored time may be later after the clock went back.
local function read(limit)
  local now = limit.at_ms * limit.number
  local current = redis.call('HGET', limit.current_key, limit.name)
  local previous = not current and redis.call('HGET', limit.previous_key, limit.previous_name)
  limit.met = current and 2 or previous and 1 or 0
  limit.most = now + limit.burst * limit.window_ms
  local free_at = current and unpack_state(current) or previous and unpack_state(previous) - limit.window_ms * limit.number or 0
  limit.free_at = math.max(now, math.min(free_at, limit.most))
end

local function wait_ms(limit)
  local too_much = limit.free_at + (cost - limit.burst) * limit.window_ms - limit.at_ms * limit.number
  return too_much > 0 and math.ceil(too_much / limit.number) or 0
end

local function count(limit)
  -- A rejected request takes at most what is left.
  limit.free_at = math.min(limit.free_at + cost * limit.window_ms, limit.most)
  redis.call('HSET', limit.current_key, limit.name, pack(limit.free_at))
end

local function rest(limit)
  local units = math.floor((limit.most - limit.free_at) / limit.window_ms)
  return units, math.ceil((limit.free_at - limit.at_ms * limit.number) / limit.number)
end

-- @include parts/inbound_decide.lua
