-- replace_past.lua: put the past that was built beside in the place of a project's past.
--
-- Guarantee: one atomic step, and only if nobody has added to the past, and nothing of what was built is missing.
--
-- KEYS  1 past, as in append.lua  2 past that was built (build.lua)
-- ARGV  1 clock_ms  0 = the server's clock; anything else is for tests and simulation
--       2 read      how many entries the past has, as its author has read it
--       3 entries   how many were built
-- Reply 1, or 0 if it was not done

local past, built = KEYS[1], KEYS[2]
local state = past

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua
-- @include parts/log_past.lua

local clock_ms = clock(tonumber(ARGV[1]))
if redis.call('XLEN', past) ~= tonumber(ARGV[2]) or redis.call('XLEN', built) ~= tonumber(ARGV[3]) then
  redis.call('DEL', built)
  return 0
end
try_rights()
redis.call('RENAME', built, past)
keep_past(clock_ms)
return 1
