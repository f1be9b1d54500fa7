-- replace_past.lua: replace a project's past by the past that build.lua made.
--
-- Guarantee: one atomic step, and only if the past has no new entry and the replacement is complete.
--
-- KEYS  1 past, as in append.lua  2 past of the replacement
-- ARGV  1 clock_ms  0 = the server's clock; another value is for tests and simulation
--       2 read      the number of entries that the author has read
--       3 entries   the number of entries in the replacement
-- Reply 1 if the past was replaced, else 0

local past, built = KEYS[1], KEYS[2]
local state = past

-- @include parts/clock.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua
-- @include parts/log_past.lua

local clock_ms = clock(tonumber(ARGV[1]))
if redis.call('XLEN', past) ~= tonumber(ARGV[2]) or redis.call('XLEN', built) ~= tonumber(ARGV[3]) then
  redis.call('DEL', built)
  return 0
end
try_rights()
if ARGV[3] ~= '0' then redis.call('RENAME', built, past) else redis.call('DEL', past) end
keep_past(clock_ms)
return 1
