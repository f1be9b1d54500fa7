-- begin.lua: read what a process needs of a project's log at its start.
--
-- Guarantee: one atomic step that changes nothing.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; another value is for tests and simulation
--       2 the number of views, then fields of the state, the views first
-- Reply {clock_ms, epoch, tip, trimmed, whole, TEXT of each field, ID, LINE, ID, LINE, ...}. `tip` is the newest entry. A view
--       whose head the log lacks is left out. If all views are of this epoch, the entries after the earliest of their heads
--       follow, at most 500; `whole` is 1 if these are all.

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local views, FIRST_NAME, MAX_UNSEEN = tonumber(ARGV[2]), 3, 500

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_lines.lua
-- @include parts/log_standing.lua

local clock_ms = clock(tonumber(ARGV[1]))
local fields = redis.call('HMGET', state, 'epoch', 'holds', 'trimmed', unpack(ARGV, FIRST_NAME))
local epoch = standing(fields[1] or '', tonumber(fields[2] or 0) or 0)
local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local reply = { clock_ms, epoch, newest and newest[1] or '0-0', fields[3] or '0-0', 0 }
local earliest
for at = 4, #fields do
  reply[#reply + 1] = fields[at]
  if at - 4 < views then
    local of_epoch, head = string.match(fields[at] or '', '^(%S+) %S+ %S+ (%d+%-%d+) ')
    if of_epoch ~= epoch then
      earliest = false
    elseif before(reply[4], head) and #redis.call('XRANGE', log, head, head) == 0 then -- a trimmed entry is not lacking
      reply[#reply], earliest = false, false
    elseif earliest == nil or (earliest and before(head, earliest)) then
      earliest = head
    end
  end
end
if earliest then
  local entries = redis.call('XRANGE', log, '(' .. earliest, '+', 'COUNT', MAX_UNSEEN + 1)
  reply[5] = #entries <= MAX_UNSEEN and 1 or 0
  for at = 1, math.min(#entries, MAX_UNSEEN) do
    reply[#reply + 1] = entries[at][1]
    reply[#reply + 1] = line_of(entries[at]) or ''
  end
end
return reply
