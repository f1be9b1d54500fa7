-- add_past.lua: add entries behind those of a project's past.
--
-- Guarantee: one atomic step. Entries that are there stay once.
--
-- KEYS  1 past, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; anything else is for tests and simulation
--       then ID LINE of each entry, in order
-- Reply {ID, LINE, ID, LINE, ...}: those that stand before the newest one and are not there yet: see replace_past.lua

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
