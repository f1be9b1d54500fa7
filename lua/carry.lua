-- carry.lua: count what this ledger has lost, because a machine remembers more than is here.
--
-- Guarantee: one atomic step; idempotent: reports of one loss are merged, the largest counts. The units reported are
-- added to the view's total until `until_ms`, whatever is charged or settled meanwhile. If this changes anything, or the
-- ledger has no epoch yet, a new epoch begins: who saw the one before is answered BEHIND, and reports what it knows.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written)
-- ARGV  1 now_ms     0 = the server's clock
--       2 epoch      the name of the new epoch: unique, without spaces
--       3 keep_ms    the state lives at least as long from now on, and as long as a carry counts
--       then four for each carry
--         view       as in charge.lua
--         epoch      the ledger as it was before the loss
--         units      what is missing of it, 1 or more
--         until_ms   when all of that would have expired
-- Reply the epoch that holds now

local state = KEYS[2]
local now_ms, new_epoch, keep_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local FIRST_CARRY, CARRY_SIZE = 4, 4

if not (now_ms and keep_ms and keep_ms >= 1 and string.find(new_epoch, '^%S+$')) then
  return redis.error_reply('ERR carry.lua: now_ms and keep_ms are numbers, and epoch a name without spaces')
end
for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local good = string.find(ARGV[at + 1] or '', '^%S+$') and string.find(ARGV[at + 2] or '', '^%d+$')
  if not (good and string.find(ARGV[at + 3] or '', '^%d+$')) then
    return redis.error_reply('ERR carry.lua: a carry is four arguments: view, epoch, units, until_ms')
  end
end
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function int(n) return string.format('%.0f', n) end
local epoch = redis.call('HGET', state, 'epoch')
local carried_ms = tonumber(redis.call('HGET', state, 'carried_ms') or 0)
local changed = not epoch

for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local field, lost, units, until_ms = 'carry:' .. ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local kept = {}
  local larger = true
  for known, known_units, known_ms in string.gmatch(redis.call('HGET', state, field) or '', '(%S+) (%d+) (%d+)') do
    known_units, known_ms = tonumber(known_units), tonumber(known_ms)
    if known == lost then
      larger = units > known_units or until_ms > known_ms
      units, until_ms = math.max(units, known_units), math.max(until_ms, known_ms)
    elseif known_ms > now_ms then
      kept[#kept + 1] = known .. ' ' .. int(known_units) .. ' ' .. int(known_ms)
    end
  end
  if larger then
    kept[#kept + 1] = lost .. ' ' .. int(units) .. ' ' .. int(until_ms)
    redis.call('HSET', state, field, table.concat(kept, ' '))
    carried_ms = math.max(carried_ms, until_ms)
    changed = true
  end
end

if changed then
  epoch = new_epoch
  redis.call('HSET', state, 'epoch', epoch, 'carried_ms', int(carried_ms))
  local live_ms = math.max(keep_ms, carried_ms - now_ms)
  if redis.call('PTTL', state) < live_ms then redis.call('PEXPIRE', state, int(live_ms)) end
end
return epoch
