-- examine.lua: what an operator should know of the server and of this project's keys. For `quota doctor`.
--
-- Guarantee: nothing is changed.
--
-- KEYS  1 log, 2 state, 3 corrections (see charge.lua), 4 history (see roll_up.lua)
-- Reply { info, lifetimes, missing, refused }
--       info        the server's INFO; empty where this user may not see it
--       lifetimes   for each key its lifetime in ms; -2 where it is missing, -1 where it has none
--       missing     the commands that the scripts need, and this user may not run
--       refused     why the server takes no charge from anybody now: a replica, out of memory; empty where it takes one

-- @include parts/rights.lua

-- What a command failed with; nil where it did not.
local function failure(reply) return type(reply) == 'table' and reply.err or nil end

local lifetimes = {}
for n, key in ipairs(KEYS) do
  local lifetime_ms = redis.pcall('PTTL', key)
  lifetimes[n] = failure(lifetime_ms) and -2 or lifetime_ms
end
local info = redis.pcall('INFO')
-- The first command that could write: after one that the server took, it refuses none for want of memory.
local refused = failure(redis.pcall('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v'))
local missing = missing_rights()
return { failure(info) and '' or info, lifetimes, missing, #missing == 0 and refused or '' }
