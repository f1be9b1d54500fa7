-- build.lua: add entries to a replacement of a log or past, which replace.lua or replace_past.lua puts in place.
--
-- Guarantee: none. An unused replacement expires.
--
-- KEYS  1 log, 2 corrected (not for a past), at KEY:building:TOKEN, see append.lua
-- ARGV  1 building_ms  the lifetime of these keys from now on; then ID LINE of each entry, in order
-- Reply 1

local log, corrected = KEYS[1], KEYS[2]
local building_ms, FIRST = ARGV[1], 2

-- @include parts/clock.lua
-- @include parts/log_lines.lua

redis.call('PEXPIRE', log, building_ms) -- fails before any write if the user lacks this right
for at = FIRST, #ARGV, 2 do
  local id, line = ARGV[at], ARGV[at + 1]
  redis.call('XADD', log, id, 'e', line)
  redis.call('PEXPIRE', log, building_ms)
  local entry = entry_in(line)
  if corrected and entry and entry.kind == 'c' then
    redis.call('HSET', corrected, entry.of, int(entry.units) .. ' ' .. id)
    redis.call('PEXPIRE', corrected, building_ms)
  end
end
return 1
