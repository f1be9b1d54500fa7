-- settle.lua: set what a charge counts, absolutely, or what several count, each. A refund settles to 0.
--
-- Guarantee: one atomic step; idempotent; never refused; the charges keep their times and ids. All views are kept up to
-- date. Of no charge is anything written before all that may fail of it was tried. The history is corrected too, if it has a charge already.
-- The rules are L15 and L29 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
--       4 history                           (see roll_up.lua)
-- ARGV  1 id       of the charge, as charge.lua gave it
--       2 units    what it counts from now on, 0 or more
--       then       the ids of others that count the same from now on: at most 100 in all
-- Reply { u, m, j, g, k, the units that it was settled to before, or "" } of the first charge, or nothing ({}), and nothing
--         is done, if one of the ids is not in the log

local log, state, corrections, history = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local PIECE = 1000
local FURTHER_IDS, MAX_CHARGES = 3, 100
local HOUR_MS = 3600000
local HISTORY_MS = 3024000000 -- 35 days (L29)
local units = tonumber(string.match(ARGV[2] or '', '^%d+$'))
if not units or #ARGV > MAX_CHARGES + 1 then
  return redis.error_reply('ERR settle.lua: units are a whole number, 0 or more, of at most ' .. MAX_CHARGES .. ' charges')
end
if #KEYS ~= 4 then return redis.error_reply('ERR settle.lua: 4 keys are needed') end

-- @include parts/int.lua
-- @include parts/ids.lua
-- @include parts/format.lua
-- @include parts/bucket_and_units.lua
-- @include parts/what_a_view_counts.lua
-- @include parts/cells.lua

local known = redis.call('HMGET', state, 'last', 'has_corrections', 'trimmed_through_ms', 'format', 'repairing', 'epoch')
local unknown_format = other_format(known[4], known[6])
if unknown_format then return unknown_format end

local trimmed_through_ms, lost_ms = tonumber(known[3]) or 0, nil
if known[1] and known[2] == '1' and redis.call('EXISTS', corrections) == 0 then -- L14
  lost_ms = split(known[1])
  trimmed_through_ms = math.max(trimmed_through_ms, lost_ms)
end

-- A charge in the log, or nothing.
local function charge_of(id)
  -- Redis reads "1-0" and "01-0" alike, and "1" as the first of that millisecond; a correction is kept by the exact id.
  local entry = redis.call('XRANGE', log, id, id)[1]
  if not entry or entry[1] ~= id then return nil end
  local bucket, charged = bucket_and_units(entry[2][2])
  return { id = id, fields = entry[2], bucket = bucket, charged = charged }
end

local charges = { charge_of(ARGV[1]) }
for at = FURTHER_IDS, #ARGV do charges[at - 1] = charge_of(ARGV[at]) end
for place = 1, math.max(1, #ARGV - 1) do
  if not charges[place] then return {} end
end

-- Set what one of them counts; the reply about it.
local function settle(charge)
  local id, f, bucket = charge.id, charge.fields, charge.bucket
  local corrected = redis.call('HGET', corrections, id)
  local counted = tonumber(corrected or charge.charged)
  -- What the views count of it: if a correction of it may have been lost nobody knows, and it may be nothing.
  local in_views = counted
  if not corrected and split(id) <= trimmed_through_ms then in_views = 0 end

  local views = {}
  local cursor = '0'
  repeat
    local piece = redis.call('HSCAN', state, cursor, 'MATCH', 'view:*', 'COUNT', PIECE)
    cursor = piece[1]
    for at = 1, #piece[2], 2 do
      local field, stored = piece[2][at], piece[2][at + 1]
      local count = counter(string.sub(field, #'view:' + 1))
      local total, tail, head, dropped_through_ms = string.match(stored, '^(%d+) (%d+%-%d+) (%d+%-%d+) (%d+)$')
      if count and total and not before(id, tail) and not before(head, id) then
        local was, is = count(bucket, f[4], f[6], in_views), count(bucket, f[4], f[6], units)
        if was ~= is then
          views[field] = int(tonumber(total) + is - was) .. ' ' .. tail .. ' ' .. head .. ' ' .. dropped_through_ms
        end
      end
    end
  until cursor == '0'

  -- L29. The history counts what the views count of it. Its sums have each correction, whether it was rolled up or not.
  local hour_field = 'hour:' .. int(math.floor(split(id) / HOUR_MS))
  local in_history = redis.call('HMGET', history, 'rolled_up', hour_field, 'sums')
  local hour, sums = in_history[2], nil
  if hour and in_history[1] and not before(in_history[1], id) and units ~= in_views then
    local cells = cells_of(hour)
    add_to_cell(cells, cell_name(f[4], f[6], f[8], bucket), 0, units - in_views)
    hour = text_of(cells)
  end
  if units ~= counted then
    sums = cells_of(in_history[3])
    add_to_cell(sums, cell_name(f[4], f[6]), 0, 0, math.abs(units - counted))
  end

  redis.call('PEXPIRE', history, HISTORY_MS)
  local ttl_ms = redis.call('PTTL', log)
  if ttl_ms > 0 then redis.call('PEXPIRE', corrections, ttl_ms) end
  if lost_ms then redis.call('HSET', state, 'trimmed_through_ms', int(trimmed_through_ms)) end
  -- A copy that a repair is making has this charge as it was: it is begun again (L26; see repair.lua).
  local copied = string.match(known[5] or '', '^%d+ (%d+%-%d+) ')
  if copied and not before(copied, id) then redis.call('HSET', state, 'repairing', '') end
  redis.call('HSET', corrections, id, int(units))
  if known[1] then redis.call('HSET', state, 'has_corrections', '1') end
  if ttl_ms > 0 then redis.call('PEXPIRE', corrections, ttl_ms) end
  for field, text in pairs(views) do redis.call('HSET', state, field, text) end
  if hour and hour ~= in_history[2] then redis.call('HSET', history, hour_field, hour) end
  if sums then
    redis.call('HSET', history, 'sums', text_of(sums))
    redis.call('PEXPIRE', history, HISTORY_MS)
  end
  return { f[2], f[4], f[6], f[8], f[10], corrected or '' }
end

local reply = settle(charges[1])
for place = 2, #charges do settle(charges[place]) end
return reply
