-- clear.lua: remove a piece of what a fenced ledger holds from before, so that it can be filled again.
--
-- Guarantee: a bounded piece, whatever there is. Only a ledger that this move is filling is cleared, and only before its
-- first piece (fence.lua, fill.lua). The rule is L27 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
--       4 history                           (see roll_up.lua)
-- ARGV  1 move    that fills this ledger
--       2 cursor  empty at first, then what the last call replied
-- Reply the cursor of the next call, "WHAT N"; "0-0" when the ledger is clear

local log, state, corrections, history = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local move, cursor = ARGV[1], ARGV[2]
local PIECE = 1000
local KEPT = { format = true, epoch = true, fenced_epoch = true, fence = true, move = true, retention_ms = true }

-- @include parts/int.lua
-- @include parts/format.lua

local known = redis.call('HMGET', state, 'format', 'fence', 'move', 'filled')
local unknown_format = other_format(known[1])
if unknown_format then return unknown_format end
if known[2] ~= 'filling' or known[3] ~= move then
  return redis.error_reply('ERR clear.lua: another move has begun, or this one has ended')
end
if known[4] then return '0-0' end

local held = redis.call('XLEN', log)
if held > PIECE then
  redis.call('XTRIM', log, 'MAXLEN', int(held - PIECE))
  return 'log ' .. int(held - PIECE)
end
-- L22. Tried where it does no harm
redis.call('HSCAN', state, '0', 'COUNT', 1)
redis.call('HDEL', state, '')
redis.call('HSET', state, 'fence', known[2])
redis.call('DEL', log)
local what, at = string.match(cursor, '^(%a+) (%d+)$')
local hashes = { { 'corrections', corrections }, { 'history', history }, { 'state', state } }
for place = what == 'state' and 3 or what == 'history' and 2 or 1, 3 do
  local name, key = unpack(hashes[place])
  local piece = redis.call('HSCAN', key, what == name and at or '0', 'COUNT', PIECE)
  for field = 1, #piece[2], 2 do
    if key ~= state or not KEPT[piece[2][field]] then redis.call('HDEL', key, piece[2][field]) end
  end
  if piece[1] ~= '0' then return name .. ' ' .. piece[1] end
end
redis.call('HSET', state, 'filled', '0-0')
return '0-0'
