-- add_past.lua: add entries to the end of a project's past.
--
-- Guarantee: one atomic step. An entry that is already there is not added again.
--
-- KEYS  1 past, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; another value is for tests and simulation
--       then ID LINE of each entry, in order
-- Reply {ID, LINE, ID, LINE, ...}: the missing entries that belong before the newest one; replace_past.lua adds them

local past = KEYS[1]
local state = past

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua
-- @include parts/log_past.lua

local clock_ms = clock(tonumber(ARGV[1]))
try_rights()
local reply = {}
for at = 2, #ARGV, 2 do
  if not add_to_past(ARGV[at], ARGV[at + 1]) then
    reply[#reply + 1] = ARGV[at]
    reply[#reply + 1] = ARGV[at + 1]
  end
end
keep_past(clock_ms)
return reply
