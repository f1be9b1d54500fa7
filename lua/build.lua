-- build.lua: add a piece to a log that is built beside, until replace.lua or replace_past.lua puts it in place.
--
-- Guarantee: none. What is never put in place expires.
--
-- KEYS  1 log, 2 corrected (of a past there are none): under names of their own, see append.lua
-- ARGV  1 building_ms  how long they live from now on; then ID LINE of each entry, in order
-- Reply 1

local log, corrected = KEYS[1], KEYS[2]
local building_ms, FIRST = ARGV[1], 2

-- @include parts/log_lines.lua

redis.call('PEXPIRE', log, building_ms) -- without the right to do that nothing is written
for at = FIRST, #ARGV, 2 do
  local id, line = ARGV[at], ARGV[at + 1]
  redis.call('XADD', log, id, 'e', line)
  redis.call('PEXPIRE', log, building_ms)
  local units, of = correction_in(line)
  if of and corrected then
    redis.call('HSET', corrected, of, units .. ' ' .. id)
    redis.call('PEXPIRE', corrected, building_ms)
  end
end
return 1
