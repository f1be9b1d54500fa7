-- repair.lua: after a clock that was wrong, give every charge that is dated ahead of the server's clock an id from now on.
--
-- Guarantee: each call copies 250 entries of the log aside. It replies MORE until it has reached the end: call again. The last
-- call puts the copy in the log's place, with all that follows from it, in one atomic step. Until then nothing else has
-- changed, and everybody charges on. If a caller was killed, the next one continues its copy; if a charge in the copy was
-- settled meanwhile, the copy begins again. The charges keep their order. Each counts at least as long as one made now.
--
-- The rule is L26 in docs/ledger-rules.md. What a copy needs to be continued stands in the state's field `repairing`: BEGUN_MS,
-- the id copied last, and its id in the copy.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
--       4 log_aside   5 corrections_aside   quota:{PROJECT}:repair:log and :repair:corrections, until the swap
--       6 history                           (see roll_up.lua)
-- ARGV  1 now_ms       0 = the server's clock
--       2 caller_ms    the caller's clock; 0 = none
--       3 epoch        a name for the new epoch: unique, without spaces, @ or /
-- Reply MORE; CLOCK where the clocks are more than 5 s apart, and nothing was done; or the new epoch, ROOT/EPOCH@AT_MS
--
-- The swap also makes all views start afresh, lets the history have hours before this one only (L29), lets unlogged usage count
-- for a window at most, removes exhaustions and claims of the future, and notes the repair in the state's field `repaired`, one
-- line for each of the last 10: "NEWEST BEGUN_MS AT_MS THROUGH". A machine that saw a charge dated ahead, up to the id NEWEST,
-- knows by it that the charge is among those that the log now has between BEGUN_MS and the id THROUGH.

local log, state, corrections, log_aside, corrections_aside = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local history = KEYS[6]
local given_ms, caller_ms, name = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] or ''

local CHUNK, PIECE = 250, 1000
local ASIDE_KEPT_MS = 3600000
local MAX_REPAIR_MS = 60000 -- what was copied longer ago is copied again
local RETENTION_SLACK_MS = 90000000 -- 25 h (L12, L17): should the clock go back, what has expired counts again
local MIN_RETENTION_MS = 176400000 -- 49 h (L12)
local HISTORY_MS = 3024000000 -- 35 days (L29)
local LONGEST_CLAIM_MS = 777600000 -- 9 days
local MAX_REPAIRS = 10
local HOUR_MS = 3600000
local MAX_SEQ = 9007199254740991
local MONTH_MS = 2682000000 -- the longest month, 31 days and an hour

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/clocks_agree.lua
-- @include parts/ids.lua
-- @include parts/format.lua
-- @include parts/bucket_and_units.lua
-- @include parts/cells.lua
-- @include parts/rights.lua

if #KEYS ~= 6 or not (given_ms and caller_ms and string.find(name, '^[^%s@/]+$')) then
  return redis.error_reply(
    'ERR repair.lua: 6 keys are needed, now_ms and caller_ms are numbers, and epoch a name without spaces, @ or /')
end
local now_ms = clock(given_ms)
-- Both clocks are needed here, whichever is behind: what is dated by a wrong one could not be mended by it.
if not clocks_agree(now_ms, caller_ms) or (caller_ms > 0 and caller_ms < now_ms - CLOCK_SLACK_MS) then return 'CLOCK' end

local known = redis.call('HMGET', state, 'last', 'epoch', 'repairing', 'trimmed_through_ms', 'retention_ms',
  'unlogged_until_ms', 'repaired', 'has_corrections', 'format')
local unknown_format = other_format(known[9], known[2])
if unknown_format then return unknown_format end
local epoch, repairing, has_corrections = known[2] or '', known[3] or '', known[8] == '1'
local trimmed_through_ms, unlogged_until_ms = tonumber(known[4]) or 0, tonumber(known[6]) or 0
if string.match(epoch, '([^/]*)@%d+$') == name then return epoch end -- our own, whose answer was lost

local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local last, kept_ms = known[1], 0
if not last then -- as charge.lua makes it again
-- @include parts/from_other_keys.lua
  last, kept_ms, has_corrections = from_other_keys()
end
local last_ms = split(last)
local lost_corrections = has_corrections and redis.call('EXISTS', corrections) == 0
if lost_corrections or (known[1] and not newest) then -- L14
  has_corrections, trimmed_through_ms = has_corrections and not lost_corrections, math.max(trimmed_through_ms, last_ms)
end
local retention_ms = math.max(kept_ms, tonumber(known[5]) or 0, MIN_RETENTION_MS)
local live_ms = math.max(retention_ms, HISTORY_MS) -- L12

local missing = missing_rights()
if #missing > 0 then return redis.error_reply('NOPERM this user may not run ' .. table.concat(missing, ', ')) end

-- -- the copy, a piece in each call -----------------------------------------------------------------------------------

local begun_ms, copied, through = string.match(repairing, '^(%d+) (%d+%-%d+) (%d+%-%d+)$')
local aside = redis.call('XREVRANGE', log_aside, '+', '-', 'COUNT', 1)[1]
if not begun_ms or (aside and aside[1] or '0-0') ~= through or math.abs(now_ms - tonumber(begun_ms)) > MAX_REPAIR_MS then
  begun_ms, copied, through = now_ms, '0-0', '0-0'
  if aside then redis.call('DEL', log_aside) end
  redis.call('DEL', corrections_aside)
end
begun_ms = math.min(tonumber(begun_ms), now_ms)
local ahead = newest and last_ms > now_ms
if ahead then
  local entries = redis.call('XRANGE', log, '(' .. copied, '+', 'COUNT', CHUNK)
  local any_corrections = redis.call('EXISTS', corrections) == 1
  local through_ms, through_seq = split(through)
  for _, entry in ipairs(entries) do
    local ms, seq = split(entry[1])
    if ms > now_ms or not before(through, entry[1]) then -- L10, as if it were charged now
      if now_ms > through_ms then ms, seq = now_ms, 0 else ms, seq = through_ms, through_seq + 1 end
    end
    copied, through_ms, through_seq = entry[1], ms, seq
    through = int(ms) .. '-' .. int(seq)
    redis.call('XADD', log_aside, through, unpack(entry[2]))
    local corrected = any_corrections and redis.call('HGET', corrections, entry[1])
    if corrected then redis.call('HSET', corrections_aside, through, corrected) end
  end
  redis.call('PEXPIRE', log_aside, ASIDE_KEPT_MS)
  redis.call('PEXPIRE', corrections_aside, ASIDE_KEPT_MS)
  redis.call('HSET', state, 'format', FORMAT, 'repairing', int(begun_ms) .. ' ' .. copied .. ' ' .. through)
  redis.call('PEXPIRE', state, int(math.max(live_ms, redis.call('PTTL', state))))
  if #entries == CHUNK then return 'MORE' end
end

-- -- the swap ---------------------------------------------------------------------------------------------------------

if not ahead then
  -- The state alone may be ahead: its log was lost.
  through, begun_ms = last_ms > now_ms and int(now_ms) .. '-0' or last, now_ms
  if aside then redis.call('DEL', log_aside) end
  redis.call('DEL', corrections_aside)
end

-- How long a view's window is at most, by its name (L2).
local UNITS_MS = { ms = 1, s = 1000, m = 60000, h = 3600000 }
local PERIODS_MS = { ['quarter-hour'] = 900000, hour = 3600000, day = 90000000, week = 608400000 }
local function window_ms(view)
  local window = string.match(view, '^[^|]*|[^|]*|[^|]*|([^|]+)') or ''
  local number, unit = string.match(window, '^(%d+)(%a+)$')
  if number and UNITS_MS[unit] then return tonumber(number) * UNITS_MS[unit] end
  return PERIODS_MS[string.match(window, '^(week)%-%a+@') or string.match(window, '^([%a-]+)@') or ''] or MONTH_MS
end

local trim_ms = math.min(trimmed_through_ms, now_ms - 1)
local latest_ms, changes, removals = 0, {}, {}
local cursor = '0'
repeat
  local piece = redis.call('HSCAN', state, cursor, 'COUNT', PIECE)
  cursor = piece[1]
  for at = 1, #piece[2], 2 do
    local field, value = piece[2][at], piece[2][at + 1]
    local kind, rest = string.match(field, '^(%a+):(.*)$')
    if kind == 'view' then
      local total, tail_ms, head = string.match(value, '^(%d+) (%d+)%-%d+ (%d+%-%d+) %d+$')
      local cutoff_ms = now_ms - window_ms(rest)
      if total and trim_ms > cutoff_ms and tonumber(tail_ms) <= trimmed_through_ms and head ~= '0-0' then
        -- L14. The view knows more than the log: its total stands. What it had not read yet is read from where that begins.
        -- One that was begun after what the log lacks knows less: a wrong clock took it past charges that count again.
        if head == last then head = through elseif split(head) > now_ms then head = int(begun_ms - 1) .. '-0' end
        changes[field] = total .. ' ' .. int(cutoff_ms + 1) .. '-0 ' .. head .. ' 0'
      else
        removals[#removals + 1] = field
      end
    elseif kind == 'unlogged' then
      local until_ms = now_ms + window_ms(rest)
      local clamped = string.gsub(value, '(%S+) (%S+) (%d+:%d+:%d+:%d+:%d+ %d+%-%d+)', function(lost, expiries, rest_of_report)
        expiries = string.gsub(expiries, '(%d+):(%d+)', function(units, at_ms)
          local expires_ms = math.min(tonumber(at_ms), until_ms)
          latest_ms = math.max(latest_ms, expires_ms)
          return units .. ':' .. int(expires_ms)
        end)
        return lost .. ' ' .. expiries .. ' ' .. rest_of_report
      end)
      if clamped ~= value then changes[field] = clamped end
    elseif kind == 'closed' then
      if (tonumber(string.match(value, '^%d+ (%d+) ')) or 0) > now_ms then removals[#removals + 1] = field end
    elseif kind == 'reopened' then
      local reopened_ms, since_ms = string.match(value, '^(%d+) [^\n]*\n%d+ (%d+) ')
      if math.max(tonumber(reopened_ms) or 0, tonumber(since_ms) or 0) > now_ms then removals[#removals + 1] = field end
    elseif kind == 'claim' then
      if (tonumber(string.match(value, '^%d+')) or 0) > now_ms + LONGEST_CLAIM_MS then removals[#removals + 1] = field end
    end
  end
until cursor == '0'

-- L29. What the history has of charges that are dated ahead is taken back: they are rolled up again under their new ids, into
-- the hours, but not into the sums, which had all of them (before this script, a caller rolls up whatever there is).
local rolled = redis.call('HGET', history, 'rolled_up')
local this_hour = math.floor(begun_ms / HOUR_MS)
local hour_field, hour_text, hours_ahead = 'hour:' .. int(this_hour), nil, {}
if ahead and rolled and split(rolled) > begun_ms then
  cursor = '0'
  repeat
    local piece = redis.call('HSCAN', history, cursor, 'MATCH', 'hour:*', 'COUNT', PIECE)
    cursor = piece[1]
    for at = 1, #piece[2], 2 do
      if tonumber(string.sub(piece[2][at], 6)) > this_hour then hours_ahead[#hours_ahead + 1] = piece[2][at] end
    end
  until cursor == '0'
  local cells, from = cells_of(redis.call('HGET', history, hour_field)), '(' .. int(begun_ms) .. '-' .. int(MAX_SEQ)
  repeat
    local entries = redis.call('XRANGE', log, from, int((this_hour + 1) * HOUR_MS - 1), 'COUNT', PIECE)
    for _, entry in ipairs(entries) do
      local f = entry[2]
      local bucket, charged = bucket_and_units(f[2])
      local counted = tonumber(redis.call('HGET', corrections, entry[1]) or charged)
      if not before(rolled, entry[1]) then add_to_cell(cells, cell_name(f[4], f[6], f[8], bucket), -1, -counted) end
      from = '(' .. entry[1]
    end
  until #entries < PIECE
  hour_text = text_of(cells)
  local unchanged = redis.call('XREVRANGE', log, int(begun_ms), '-', 'COUNT', 1)[1]
  rolled = unchanged and unchanged[1] or int(begun_ms - 1) .. '-' .. int(MAX_SEQ)
else
  rolled = nil
end

-- Of two repairs by different clocks, the later one has the higher number.
local at_ms = math.max(now_ms, (tonumber(string.match(epoch, '@(%d+)$')) or 0) + 1)
local lines = { last .. ' ' .. int(begun_ms) .. ' ' .. int(at_ms) .. ' ' .. through }
for line in string.gmatch(known[7] or '', '[^\n]+') do
  if #lines < MAX_REPAIRS then lines[#lines + 1] = line end
end
local root = string.match(epoch, '^[^/]*')
epoch = (root ~= '' and root .. '/' or '') .. name .. '@' .. int(at_ms)

if ahead then
  redis.call('RENAME', log_aside, log)
  if redis.call('EXISTS', corrections_aside) == 1 then redis.call('RENAME', corrections_aside, corrections) end
end
redis.call('HSET', state, 'format', FORMAT, 'epoch', epoch, 'repaired', table.concat(lines, '\n'),
  'trimmed_through_ms', int(trim_ms), 'has_corrections', has_corrections and '1' or '0',
  'retention_ms', int(retention_ms), 'unlogged_until_ms', int(math.min(unlogged_until_ms, latest_ms)))
if through ~= '0-0' then redis.call('HSET', state, 'last', through) end
for _, field in ipairs(removals) do redis.call('HDEL', state, field) end
for field, value in pairs(changes) do redis.call('HSET', state, field, value) end
redis.call('HDEL', state, 'repairing')
if rolled then
  for _, field in ipairs(hours_ahead) do redis.call('HDEL', history, field) end
  redis.call('HSET', history, hour_field, hour_text, 'rolled_up', rolled, 'sums_after', through)
  redis.call('HSET', state, 'rolled_up', rolled)
end
live_ms = math.max(live_ms, math.min(unlogged_until_ms, latest_ms) + RETENTION_SLACK_MS - now_ms)
for _, key in ipairs({ log, state, corrections }) do redis.call('PEXPIRE', key, int(live_ms)) end
return epoch
