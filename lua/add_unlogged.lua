-- add_unlogged.lua: count what this ledger has lost, because a machine remembers more than is here.
--
-- Guarantee: one atomic step; idempotent: several reports of one loss are one, at every moment the largest of them. Their
-- units are added to the view's total, each until its time, whatever is charged or settled meanwhile. If this changes
-- anything, or the ledger has no epoch yet, a new epoch begins: a caller that knows the one before is answered BEHIND, and
-- reports what it saw. An epoch's name begins with that of the log's first, its root, "ROOT" or "ROOT/EPOCH": it tells another
-- log from a copy of this one.
--
-- Usage of an epoch "ROOT/*" or "ROOT/EPOCH/*" is a carry: what was seen of another log, which was in use before this one.
-- Of two carries the larger counts at every moment, and no new epoch begins. A carry of this log's own root is ignored: the
-- log has it. The rules are L17 and L18 in docs/ledger-rules.md; `quota/ledger/unlogged.py` merges the same way.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written, and all live as long)
-- ARGV  1 now_ms         0 = the server's clock
--       2 epoch          a name for the new epoch: unique, without spaces, @ or /
--       3 retention_ms   as in charge.lua; the keys also live as long as unlogged usage counts
--       then five for each report
--         view           as in charge.lua
--         epoch          the ledger as it was before the loss
--         expiries       what is missing of it, soonest first: UNITS:UNTIL_MS,UNITS:UNTIL_MS, until when each counts. One
--                        pair for all of it is right too, and counts longer than it must
--         kept           KEPT_UNITS:KEPT_SINCE_MS:KEPT_LAST_MS:LOGGED_UNITS:SINCE_MS. KEPT_UNITS of this view are still in
--                        the log, or there again, and in its window, of what came after KEPT_SINCE_MS, the last of them at
--                        KEPT_LAST_MS. The report is of what was seen after SINCE_MS; LOGGED_UNITS of that are not missing.
--                        If these are fewer than another report has kept, the rest fell to a later loss, and is reported for
--                        that one. Unknown: 0:0:0:0:9007199254740991
--         last           the id of the newest entry that was seen before the loss. A report with no later one, and no more
--                        units, changes nothing
-- Reply the epoch that holds now

local state = KEYS[2]
local now_ms, new_epoch, retention_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local FIRST_REPORT, REPORT_SIZE = 4, 5
local RETENTION_SLACK_MS = 90000000 -- 25 h (L12, L17): should the clock go back, what has expired counts again
local HISTORY_MS = 3024000000 -- 35 days (L29)

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/format.lua

if not (now_ms and retention_ms and retention_ms >= 1 and string.find(new_epoch, '^[^%s@/]+$')) then
  return redis.error_reply(
    'ERR add_unlogged.lua: now_ms and retention_ms are numbers, and epoch a name without spaces, @ or /')
end
for at = FIRST_REPORT, #ARGV, REPORT_SIZE do
  local expiries, kept, last = ARGV[at + 2] or '', ARGV[at + 3] or '', ARGV[at + 4] or ''
  local left = string.gsub(expiries .. ',', '%d+:%d+,', '')
  local good = string.find(ARGV[at + 1] or '', '^%S+$') and string.find(kept, '^%d+:%d+:%d+:%d+:%d+$')
  if left ~= '' or not (good and string.find(last, '^%d+%-%d+$')) then
    return redis.error_reply(
      'ERR add_unlogged.lua: a report is five arguments: view, epoch, expiries, kept, last')
  end
end
now_ms = clock(now_ms)

local function units_at(expiries, at_ms)
  local sum = 0
  for units, until_ms in string.gmatch(expiries, '(%d+):(%d+)') do
    if tonumber(until_ms) > at_ms then sum = sum + tonumber(units) end
  end
  return sum
end
-- The expiries of as many `units`: those that count longest.
local function newest_expiries(expiries, units)
  local pairs_there, found = {}, {}
  for n, until_ms in string.gmatch(expiries, '(%d+):(%d+)') do
    pairs_there[#pairs_there + 1] = { tonumber(n), until_ms }
  end
  for at = #pairs_there, 1, -1 do
    if units <= 0 then break end
    table.insert(found, 1, int(math.min(pairs_there[at][1], units)) .. ':' .. pairs_there[at][2])
    units = units - pairs_there[at][1]
  end
  return table.concat(found, ',')
end
local function numbers_of(kept)
  local units, from_ms, through_ms, logged_units, since_ms = string.match(kept, '^(%d+):(%d+):(%d+):(%d+):(%d+)$')
  return { tonumber(units), tonumber(from_ms), tonumber(through_ms) }, tonumber(logged_units), tonumber(since_ms)
end
-- Of what two reports say was kept, the one with more units, or the later one.
local function larger_kept(a, b)
  for at = 1, 3 do
    if a[at] ~= b[at] then return a[at] > b[at] and a or b end
  end
  return a
end
-- Without what the ledger still had of it by the other report, if this report surely holds that; and how much of what
-- was seen is not in it then.
local function less_kept(expiries, numbers, last, kept)
  local _, logged_units, since_ms = numbers_of(numbers)
  if kept[1] <= logged_units or since_ms > kept[2] or split(last) < kept[3] then return expiries, logged_units end
  return newest_expiries(expiries, units_at(expiries, -1) - (kept[1] - logged_units)), kept[1]
end
-- At every moment the larger of both.
local function larger(a, b)
  local ends, found = {}, {}
  for until_ms in string.gmatch(a .. ',' .. b, ':(%d+)') do
    if not found[until_ms] then
      ends[#ends + 1] = tonumber(until_ms)
      found[until_ms] = true
    end
  end
  table.sort(ends)
  local expiries, counted = {}, 0
  for at = #ends, 1, -1 do
    local units = math.max(units_at(a, ends[at] - 1), units_at(b, ends[at] - 1))
    if units > counted then
      table.insert(expiries, 1, int(units - counted) .. ':' .. int(ends[at]))
      counted = units
    end
  end
  return table.concat(expiries, ',')
end
local function latest_of(expiries)
  local latest_ms = 0
  for until_ms in string.gmatch(expiries, ':(%d+)') do latest_ms = math.max(latest_ms, tonumber(until_ms)) end
  return latest_ms
end

local stored = redis.call('HMGET', state, 'epoch', 'unlogged_until_ms', 'retention_ms', 'format')
local unknown_format = other_format(stored[4], stored[1])
if unknown_format then return unknown_format end
local epoch, unlogged_until_ms = stored[1], tonumber(stored[2] or 0)
local root = epoch and string.match(epoch, '^[^/]*')
local begins, changed = not epoch, not epoch
-- L22. Tried before anything is written.
local stored_retention_ms = math.max(retention_ms, tonumber(stored[3] or 0))
redis.call('PEXPIRE', state, int(math.max(stored_retention_ms, redis.call('PTTL', state))))

for at = FIRST_REPORT, #ARGV, REPORT_SIZE do
  local field, lost, expiries, kept, last = 'unlogged:' .. ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local carry = string.sub(lost, -2) == '/*'
  local stands, news = {}, not (carry and string.match(lost, '^[^/]*') == root)
  local reports = redis.call('HGET', state, field) or ''
  for known, known_expiries, known_kept, known_last in
    string.gmatch(reports, '(%S+) (%S+) (%d+:%d+:%d+:%d+:%d+) (%d+%-%d+)')
  do
    if known == lost then
      local known_most, _, known_since_ms = numbers_of(known_kept)
      local most, _, since_ms = numbers_of(kept)
      most = larger_kept(known_most, most)
      local ours, ours_logged = less_kept(known_expiries, known_kept, known_last, most)
      local theirs, theirs_logged = less_kept(expiries, kept, last, most)
      local further = before(known_last, last)
      local more = ours ~= known_expiries or further or units_at(theirs, now_ms) > units_at(ours, now_ms)
      expiries = larger(ours, theirs)
      news = news and (more or (carry and expiries ~= known_expiries))
      if expiries == '' then expiries = '0:' .. int(latest_of(known_expiries)) end
      kept = table.concat({ int(most[1]), int(most[2]), int(most[3]), int(math.max(ours_logged, theirs_logged)),
        int(math.max(since_ms, known_since_ms)) }, ':')
      if not further then last = known_last end
    elseif latest_of(known_expiries) + RETENTION_SLACK_MS > now_ms then
      stands[#stands + 1] = known .. ' ' .. known_expiries .. ' ' .. known_kept .. ' ' .. known_last
    end
  end
  if news then
    stands[#stands + 1] = lost .. ' ' .. expiries .. ' ' .. kept .. ' ' .. last
    redis.call('HSET', state, 'format', FORMAT, field, table.concat(stands, ' '))
    unlogged_until_ms = math.max(unlogged_until_ms, latest_of(expiries))
    changed, begins = true, begins or not carry
  end
end

redis.call('HSET', state, 'format', FORMAT, 'retention_ms', int(stored_retention_ms))
if begins then epoch = root and root .. '/' .. new_epoch .. (string.match(epoch, '@%d+$') or '') or new_epoch end
if changed then
  redis.call('HSET', state, 'epoch', epoch, 'unlogged_until_ms', int(unlogged_until_ms))
end
local live_ms = math.max(stored_retention_ms, HISTORY_MS, unlogged_until_ms + RETENTION_SLACK_MS - now_ms)
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < live_ms then redis.call('PEXPIRE', key, int(live_ms)) end
end
return epoch
