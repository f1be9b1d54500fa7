-- carry.lua: count what this ledger has lost, because a machine remembers more than is here.
--
-- Guarantee: one atomic step; idempotent: several reports of one loss are one, at every moment the largest of them. Its
-- parts are added to the view's total, each until its time, whatever is charged or settled meanwhile. If this changes
-- anything, or the ledger has no epoch yet, a new epoch begins: who saw the one before is answered BEHIND, and reports what
-- it knows. An epoch's name begins with that of the log's first, "FIRST" or "FIRST/EPOCH": it tells another log from a copy
-- of this one.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written, and all live as long)
-- ARGV  1 now_ms     0 = the server's clock
--       2 epoch      a name for the new epoch: unique, without spaces or /
--       3 keep_ms    as in charge.lua; the keys also live as long as a carry counts
--       then five for each carry
--         view       as in charge.lua
--         epoch      the ledger as it was before the loss
--         parts      what is missing of it, soonest first: UNITS:UNTIL_MS,UNITS:UNTIL_MS, until when each would have
--                    expired. One part for all of it is right too, and counts longer than it must
--         kept       UNITS:KEPT_SINCE_MS:SINCE_MS. So many units of this view are still in the log, or there again, of
--                    what came after KEPT_SINCE_MS; the report holds what came after SINCE_MS. If another report says
--                    less, the rest fell to a later loss, and is carried for that one. Unknown: 0:0:9007199254740991
--         last       the id of the newest entry that was seen before the loss. Who reports no later one, and no more units,
--                    had seen no more than is carried
-- Reply the epoch that holds now

local state = KEYS[2]
local now_ms, new_epoch, keep_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local FIRST_CARRY, CARRY_SIZE = 4, 5
local KEEP_SLACK_MS = 90000000 -- 25 h: should the clock go back, what has expired counts again

if not (now_ms and keep_ms and keep_ms >= 1 and string.find(new_epoch, '^[^%s/]+$')) then
  return redis.error_reply('ERR carry.lua: now_ms and keep_ms are numbers, and epoch a name without spaces or /')
end
for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local parts, kept, last = ARGV[at + 2] or '', ARGV[at + 3] or '', ARGV[at + 4] or ''
  local left = string.gsub(parts .. ',', '%d+:%d+,', '')
  local good = string.find(ARGV[at + 1] or '', '^%S+$') and string.find(kept, '^%d+:%d+:%d+$')
  if left ~= '' or not (good and string.find(last, '^%d+%-%d+$')) then
    return redis.error_reply('ERR carry.lua: a carry is five arguments: view, epoch, parts, kept, last')
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
local function units_at(parts, now)
  local sum = 0
  for units, until_ms in string.gmatch(parts, '(%d+):(%d+)') do
    if tonumber(until_ms) > now then sum = sum + tonumber(units) end
  end
  return sum
end
-- So many of the units: those that count longest.
local function newest(parts, units)
  local there, found = {}, {}
  for n, until_ms in string.gmatch(parts, '(%d+):(%d+)') do there[#there + 1] = { tonumber(n), until_ms } end
  for at = #there, 1, -1 do
    if units <= 0 then break end
    table.insert(found, 1, int(math.min(there[at][1], units)) .. ':' .. there[at][2])
    units = units - there[at][1]
  end
  return table.concat(found, ',')
end
local function numbers_of(kept)
  local units, kept_since_ms, since_ms = string.match(kept, '^(%d+):(%d+):(%d+)$')
  return tonumber(units), tonumber(kept_since_ms), tonumber(since_ms)
end
-- Without what the ledger had kept of it by another's report, if it surely holds that.
local function less_kept(parts, kept, units, kept_since_ms)
  local own_units, _, since_ms = numbers_of(kept)
  if units <= own_units or since_ms > kept_since_ms then return parts end
  return newest(parts, units_at(parts, -1) - (units - own_units))
end
-- At every moment the larger of both.
local function larger(a, b)
  local ends, seen = {}, {}
  for until_ms in string.gmatch(a .. ',' .. b, ':(%d+)') do
    if not seen[until_ms] then
      ends[#ends + 1] = tonumber(until_ms)
      seen[until_ms] = true
    end
  end
  table.sort(ends)
  local parts, counted = {}, 0
  for at = #ends, 1, -1 do
    local units = math.max(units_at(a, ends[at] - 1), units_at(b, ends[at] - 1))
    if units > counted then
      table.insert(parts, 1, int(units - counted) .. ':' .. int(ends[at]))
      counted = units
    end
  end
  return table.concat(parts, ',')
end
local function until_of(parts)
  local latest = 0
  for until_ms in string.gmatch(parts, ':(%d+)') do latest = math.max(latest, tonumber(until_ms)) end
  return latest
end
local epoch = redis.call('HGET', state, 'epoch')
local carried_ms = tonumber(redis.call('HGET', state, 'carried_ms') or 0)
local changed = not epoch
-- Tried before anything is written: Redis takes nothing back when a script fails.
local kept_ms = math.max(keep_ms, tonumber(redis.call('HGET', state, 'keep_ms') or 0))
redis.call('PEXPIRE', state, int(math.max(kept_ms, redis.call('PTTL', state))))

for at = FIRST_CARRY, #ARGV, CARRY_SIZE do
  local field, lost, parts, kept, last = 'carry:' .. ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local stands, news = {}, true
  local carried = redis.call('HGET', state, field) or ''
  for known, known_parts, known_kept, known_last in string.gmatch(carried, '(%S+) (%S+) (%d+:%d+:%d+) (%d+%-%d+)') do
    if known == lost then
      local units, kept_since_ms, since_ms = numbers_of(kept)
      local known_units, known_kept_since_ms, known_since_ms = numbers_of(known_kept)
      if known_units > units or (known_units == units and known_kept_since_ms > kept_since_ms) then
        units, kept_since_ms = known_units, known_kept_since_ms
      end
      local ours = less_kept(known_parts, known_kept, units, kept_since_ms)
      parts = less_kept(parts, kept, units, kept_since_ms)
      local further = not at_most(last, known_last)
      news = ours ~= known_parts or further or units_at(parts, now_ms) > units_at(ours, now_ms)
      parts = larger(ours, parts)
      if parts == '' then parts = '0:' .. int(until_of(known_parts)) end
      kept = int(units) .. ':' .. int(kept_since_ms) .. ':' .. int(math.max(since_ms, known_since_ms))
      if not further then last = known_last end
    elseif until_of(known_parts) + KEEP_SLACK_MS > now_ms then
      stands[#stands + 1] = known .. ' ' .. known_parts .. ' ' .. known_kept .. ' ' .. known_last
    end
  end
  if news then
    stands[#stands + 1] = lost .. ' ' .. parts .. ' ' .. kept .. ' ' .. last
    redis.call('HSET', state, field, table.concat(stands, ' '))
    carried_ms = math.max(carried_ms, until_of(parts))
    changed = true
  end
end

redis.call('HSET', state, 'keep_ms', int(kept_ms))
if changed then
  epoch = epoch and string.match(epoch, '^[^/]*') .. '/' .. new_epoch or new_epoch
  redis.call('HSET', state, 'epoch', epoch, 'carried_ms', int(carried_ms))
end
local live_ms = math.max(kept_ms, carried_ms + KEEP_SLACK_MS - now_ms)
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < live_ms then redis.call('PEXPIRE', key, int(live_ms)) end
end
return epoch
