-- inbound_top.lua: read some identities of a hash of inbound_counter.lua or inbound_gcra.lua, or the units of a list of
-- inbound_log.lua.
--
-- Guarantee: changes nothing. Names are bytes, so the reply has them in hexadecimal digits.
--
-- KEYS  1 hash     of one shard in one window; or list, of one identity
-- ARGV  1 cursor   0 to begin, then the cursor of the last reply, until it is 0 again
--       2 packed   1 = a hash of inbound_gcra.lua, whose values are bytes; else 0
-- Reply { cursor, (name, value) for each identity }; for a list { 0, '', units }

local COUNT = 500
local cursor, packed = ARGV[1], ARGV[2] == '1'
if #KEYS ~= 1 or #ARGV ~= 2 or not tonumber(cursor) then
  return redis.error_reply('ERR inbound_top.lua: one key, a cursor, and whether values are packed are needed')
end
if redis.call('TYPE', KEYS[1]).ok == 'list' then
  local _, before, units = struct.unpack('>I4I6I2', redis.call('LINDEX', KEYS[1], -1))
  return { '0', '', before + units }
end
local function hexadecimal(name)
  return (string.gsub(name, '.', function(byte) return string.format('%02x', string.byte(byte)) end))
end
local page = redis.call('HSCAN', KEYS[1], cursor, 'COUNT', COUNT)
local reply, words = { page[1] }, page[2]
for n = 1, #words, 2 do
  reply[n + 1] = hexadecimal(words[n])
  reply[n + 2] = packed and (struct.unpack('>I' .. #words[n + 1], words[n + 1])) or tonumber(words[n + 1])
end
return reply
