-- read.lua: a piece of the log, with corrections applied. Changes nothing.
--
-- KEYS  1 log   2 state (unused; every script takes the same three)   3 amended
-- ARGV  1 from    first id; "(ID" for exclusive
--       2 to      last id or millisecond, inclusive
--       3 count   at most this many entries, 1 to 1000; another number is an error
-- Reply { { id, u, m, j, g, t, amended units or "" }, ... } in time order

local log, amended = KEYS[1], KEYS[3]
local from, to, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not (count and count >= 1 and count <= 1000) then
  return redis.error_reply('ERR read.lua: count is 1 to 1000')
end

local any_amended = redis.call('EXISTS', amended) == 1
local reply = {}
for i, entry in ipairs(redis.call('XRANGE', log, from, to, 'COUNT', count)) do
  local f = entry[2]
  reply[i] = { entry[1], f[2], f[4], f[6], f[8], f[10], any_amended and redis.call('HGET', amended, entry[1]) or '' }
end
return reply
