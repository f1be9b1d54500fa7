-- carry.lua: count what this ledger has lost, because a machine remembers more than is here.
--
-- Guarantee: one atomic step; idempotent: of several reports of one loss, the one that goes furthest counts. Its units are
-- added to the view's total until `until_ms`, whatever is charged or settled meanwhile. If this changes anything, or the
-- ledger has no epoch yet, a new epoch begins: who saw the one before is answered BEHIND, and reports what it knows. An
-- epoch's name begins with that of the log's first, "FIRST" or "FIRST/EPOCH": it tells another log from a copy of this one.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written)
-- ARGV  1 now_ms     0 = the server's clock
--       2 epoch      a name for the new epoch: unique, without spaces or /
--       3 keep_ms    the state lives at least as long from now on, and as long as a carry counts
--       then five for each carry
--         view       as in charge.lua
--         epoch      the ledger as it was before the loss
--         units      what is missing of it, 1 or more
--         until_ms   when all of that would have expired
--         last       the id of the newest entry that was seen before the loss. Who reports no later one had seen no more
--                    than is carried, or what survived that loss, and fell to a later one
-- Reply the epoch that holds now

local state = KEYS[2]
local now_ms, new_epoch, keep_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local FIRST_CARRY, CARRY_SIZE = 4, 5
local KEEP_SLACK_MS = 90000000 -- 25 h: should the clock go back, what has expired counts again

if not (now_ms and keep_ms and keep_ms >= 1 and string.find(new_epoch, '^[^%s/]+$')) then
  return redis.error_reply('ERR carry.lua: now_ms and keep_ms are numbers, and epoch a name without spaces or /')
end
for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local good = string.find(ARGV[at + 1] or '', '^%S+$') and string.find(ARGV[at + 2] or '', '^%d+$')
  if not (good and string.find(ARGV[at + 3] or '', '^%d+$') and string.find(ARGV[at + 4] or '', '^%d+%-%d+$')) then
    return redis.error_reply('ERR carry.lua: a carry is five arguments: view, epoch, units, until_ms, last')
  end
end
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function at_most(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  a_ms, a_seq, b_ms, b_seq = tonumber(a_ms), tonumber(a_seq), tonumber(b_ms), tonumber(b_seq)
  return a_ms < b_ms or (a_ms == b_ms and a_seq <= b_seq)
end
local function int(n) return string.format('%.0f', n) end
local epoch = redis.call('HGET', state, 'epoch')
local carried_ms = tonumber(redis.call('HGET', state, 'carried_ms') or 0)
local changed = not epoch

for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local field, lost, last = 'carry:' .. ARGV[at], ARGV[at + 1], ARGV[at + 4]
  local units, until_ms = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local kept, further = {}, true
  local carried = redis.call('HGET', state, field) or ''
  for known, known_units, known_ms, known_last in string.gmatch(carried, '(%S+) (%d+) (%d+) (%d+%-%d+)') do
    if known == lost then
      further = not at_most(last, known_last)
      units, until_ms = math.max(units, tonumber(known_units)), math.max(until_ms, tonumber(known_ms))
    elseif tonumber(known_ms) + KEEP_SLACK_MS > now_ms then
      kept[#kept + 1] = known .. ' ' .. known_units .. ' ' .. known_ms .. ' ' .. known_last
    end
  end
  if further then
    kept[#kept + 1] = lost .. ' ' .. int(units) .. ' ' .. int(until_ms) .. ' ' .. last
    redis.call('HSET', state, field, table.concat(kept, ' '))
    carried_ms = math.max(carried_ms, until_ms)
    changed = true
  end
end

if changed then
  epoch = epoch and string.match(epoch, '^[^/]*') .. '/' .. new_epoch or new_epoch
  redis.call('HSET', state, 'epoch', epoch, 'carried_ms', int(carried_ms))
  local live_ms = math.max(keep_ms, carried_ms + KEEP_SLACK_MS - now_ms)
  if redis.call('PTTL', state) < live_ms then redis.call('PEXPIRE', state, int(live_ms)) end
end
return epoch
