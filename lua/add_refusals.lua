-- add_refusals.lua: keep what a process was refused, for people. Nothing is decided by it.
--
-- Guarantee: one atomic step. What is sent twice counts twice: a caller whose answer was lost does not repeat it. The rule is
-- L30 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the format is read)
--       4 history                           (see roll_up.lua). Written here:
--                   refused:N    the hour that begins at N hours since 1970: "LIMIT|JOB|REASON CALLS"
--                   refused_sums since the history began: the same lines
--                   refusals     how many were kept as a whole, ever
--                   refusal:N    the newest of them, N from 0 to 99
-- ARGV  1 counts     how many counts follow, at most 200
--       then for each count five: hour (since 1970), limit, job, reason, calls
--       then refusals as a whole, at most 100, oldest first: a text each, at most 4,000 bytes
-- Reply how many refusals were kept as a whole, ever

local history = KEYS[4]
local counts = tonumber(string.match(ARGV[1] or '', '^%d+$'))
local FIRST_COUNT, COUNT_SIZE, MAX_COUNTS = 2, 5, 200
local MAX_REFUSALS, MAX_REFUSAL = 100, 4000
local HISTORY_MS = 3024000000 -- 35 days (L29)

-- @include parts/int.lua
-- @include parts/format.lua
-- @include parts/cells.lua

local first_whole = counts and FIRST_COUNT + counts * COUNT_SIZE
if #KEYS ~= 4 or not counts or counts > MAX_COUNTS or #ARGV < first_whole - 1 or #ARGV >= first_whole + MAX_REFUSALS then
  return redis.error_reply('ERR add_refusals.lua: 4 keys are needed, at most ' .. MAX_COUNTS .. ' counts of five arguments, '
    .. 'and at most ' .. MAX_REFUSALS .. ' refusals')
end
for at = FIRST_COUNT, first_whole - 1, COUNT_SIZE do
  if not (string.find(ARGV[at], '^%d+$') and #ARGV[at] <= 9 and string.find(ARGV[at + 4], '^%d+$') and #ARGV[at + 4] <= 9) then
    return redis.error_reply('ERR add_refusals.lua: a count is hour, limit, job, reason, calls')
  end
end
for at = first_whole, #ARGV do
  if #ARGV[at] > MAX_REFUSAL then
    return redis.error_reply('ERR add_refusals.lua: a refusal is longer than ' .. MAX_REFUSAL .. ' bytes')
  end
end

local known = redis.call('HMGET', KEYS[2], 'format', 'epoch')
local unknown_format = other_format(known[1], known[2])
if unknown_format then return unknown_format end

local hours, sums = {}, cells_of(redis.call('HGET', history, 'refused_sums'))
local dirty = {}
for at = FIRST_COUNT, first_whole - 1, COUNT_SIZE do
  local field = 'refused:' .. int(tonumber(ARGV[at]))
  hours[field] = hours[field] or cells_of(redis.call('HGET', history, field))
  local name, calls = cell_name(ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]), tonumber(ARGV[at + 4])
  add_to_cell(hours[field], name, calls)
  add_to_cell(sums, name, calls)
end
if counts > 0 then dirty = { 'refused_sums', text_of(sums) } end
for field, cells in pairs(hours) do
  dirty[#dirty + 1] = field
  dirty[#dirty + 1] = text_of(cells)
end
local kept = tonumber(redis.call('HGET', history, 'refusals')) or 0
for at = first_whole, #ARGV do
  dirty[#dirty + 1] = 'refusal:' .. int(kept % MAX_REFUSALS)
  dirty[#dirty + 1] = ARGV[at]
  kept = kept + 1
end
dirty[#dirty + 1] = 'refusals'
dirty[#dirty + 1] = int(kept)
redis.call('PEXPIRE', history, HISTORY_MS) -- L22: tried where it does no harm
redis.call('HSET', history, unpack(dirty))
redis.call('PEXPIRE', history, HISTORY_MS)
return kept
