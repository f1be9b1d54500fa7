-- fill.lua: put a piece of a ledger that moves into the one that it moves to.
--
-- Guarantee: one atomic step, and idempotent: pieces follow each other without a gap, and one that is here already changes
-- nothing. Only a ledger that this move is filling takes it (fence.lua). The rule is L27 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
--       4 history                           (see roll_up.lua)
-- ARGV  1 move          that fills this ledger
--       2 retention_ms  the keys live at least as long
--       3 after         the id up to which it is filled; 0-0 before the first piece. Another: nothing changes
--       4 count         of entries that follow, 0 to 1000
--       then seven for each: id, u, method, job, region, idempotency_key, the units that it counts now, or nothing where
--         nobody has settled it
--       then two for each field of the state: its name and its value; history:NAME is one of the history
-- Reply the id up to which it is filled now

local log, state, corrections, history = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local move, retention_ms, after, count = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST_ENTRY, ENTRY_SIZE, MAX_ENTRIES = 5, 7, 1000
local HISTORY_MS = 3024000000 -- 35 days (L29)

-- @include parts/ids.lua
-- @include parts/format.lua
-- @include parts/live_on.lua

local first_field = FIRST_ENTRY + (count or 0) * ENTRY_SIZE
if #KEYS ~= 4 or not (retention_ms and retention_ms >= 1 and count and count >= 0 and count <= MAX_ENTRIES)
  or #ARGV < first_field - 1 or (#ARGV - first_field + 1) % 2 ~= 0
then
  return redis.error_reply('ERR fill.lua: four keys, four arguments, seven for each of at most ' .. MAX_ENTRIES
    .. ' entries, two for each field')
end
local known = redis.call('HMGET', state, 'format', 'fence', 'move', 'filled')
local unknown_format = other_format(known[1])
if unknown_format then return unknown_format end
if known[2] ~= 'filling' or known[3] ~= move then
  return redis.error_reply('ERR fill.lua: another move has begun, or this one has ended')
end
if known[4] ~= after then return known[4] or '' end

local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local last = newest and newest[1] or '0-0'
-- L22. Tried where it does no harm
live_on(math.max(retention_ms, HISTORY_MS)) -- L12
redis.call('HSET', state, 'fence', known[2])
for at = FIRST_ENTRY, first_field - 1, ENTRY_SIZE do
  local id, corrected = ARGV[at], ARGV[at + 6]
  if before(last, id) then -- else a script that failed in the middle has put it here
    redis.call('XADD', log, id, 'u', ARGV[at + 1], 'm', ARGV[at + 2], 'j', ARGV[at + 3], 'g', ARGV[at + 4],
      'k', ARGV[at + 5])
  end
  if corrected ~= '' then redis.call('HSET', corrections, id, corrected) end
  after = id
end
for at = first_field, #ARGV, 2 do
  local of_history = string.match(ARGV[at], '^history:(.*)$')
  redis.call('HSET', of_history and history or state, of_history or ARGV[at], ARGV[at + 1])
end
redis.call('HSET', state, 'filled', after)
live_on(math.max(retention_ms, HISTORY_MS))
return after
