-- begin.lua: read what a process needs of a project's log at its start.
--
-- Guarantee: one atomic step that changes nothing.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; another value is for tests and simulation
--       2 the number of views, then fields of the state, the views first
-- Reply {clock_ms, epoch, tip, trimmed, TEXT of each field}. `tip` is the newest entry. A view of this epoch whose head the log
--       lacks is left out.

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local views, FIRST_NAME = tonumber(ARGV[2]), 3

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_standing.lua

local fields = redis.call('HMGET', state, 'epoch', 'holds', 'trimmed', unpack(ARGV, FIRST_NAME))
local epoch = standing(fields[1] or '', tonumber(fields[2] or 0) or 0)
local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local reply = { clock(tonumber(ARGV[1])), epoch, newest and newest[1] or '0-0', fields[3] or '0-0' }
for at = 4, #fields do
  local of_epoch, head = string.match(at - 4 < views and fields[at] or '', '^(%S+) %S+ %S+ (%d+%-%d+) ')
  local is_lacking = of_epoch == epoch and before(reply[4], head) and #redis.call('XRANGE', log, head, head) == 0
  reply[#reply + 1] = not is_lacking and fields[at]
end
return reply
