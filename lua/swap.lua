-- swap.lua: change fields of a project's state, if what the caller has read of it still stands.
--
-- Guarantee: one atomic step. If all fields that the change rests on are as the caller has read them, all changes are made. Else
-- nothing is changed, and the reply says what stands: the caller decides anew. What changes, and when, is decided in
-- `quota/ledger/state_changes.py`.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is changed, and all live on)
-- ARGV  1 now_ms    0 = the server's clock
--       2 keep_ms   the keys live at least so long from now on
--       3 seen      from the reply by which the caller decided; nothing: it has read nothing yet
--       4 count     of the fields that the change rests on, at most 2000, whose names follow
--       then two for each field that changes, at most 2000: its name, and what it becomes, = and a text, or - for none
-- Reply 1 if it is changed; else { now_ms, seen, the text in each of the fields that the change rests on, or nil }

local state = KEYS[2]
local now_ms, keep_ms, seen, count = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST_NAME, CHANGE_SIZE, MAX_FIELDS = 5, 2, 2000

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/format.lua
-- @include parts/live_on.lua

local first_change = FIRST_NAME + (count or 0)
local changes = (#ARGV - first_change + 1) / CHANGE_SIZE
if not (now_ms and keep_ms and keep_ms >= 1 and count and count >= 0 and count <= MAX_FIELDS)
  or changes % 1 ~= 0 or changes < 0 or changes > MAX_FIELDS
then
  return redis.error_reply('ERR swap.lua: now_ms and keep_ms are numbers; at most ' .. MAX_FIELDS
    .. ' names follow, and two arguments for each of as many changes')
end
now_ms = clock(now_ms)
local known = redis.call('HMGET', state, 'format', 'epoch')
local unknown_format = other_format(known[1], known[2])
if unknown_format then return unknown_format end

local reply, stands = { int(now_ms), '' }, {}
for at = FIRST_NAME, first_change - 1 do
  local found = redis.call('HGET', state, ARGV[at])
  reply[#reply + 1] = found
  stands[#stands + 1] = found and #found .. ':' .. found or '-'
end
reply[2] = redis.sha1hex(table.concat(stands, ' '))
if reply[2] ~= seen then return reply end

-- L22. Tried where it does no harm.
live_on(keep_ms)
redis.call('HDEL', state, '')
redis.call('HSET', state, 'format', FORMAT)
for at = first_change, #ARGV, CHANGE_SIZE do
  if ARGV[at + 1] == '-' then
    redis.call('HDEL', state, ARGV[at])
  else
    redis.call('HSET', state, ARGV[at], string.sub(ARGV[at + 1], 2))
  end
end
live_on(keep_ms)
return 1
