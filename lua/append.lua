-- append.lua: append entries to a project's log, unless an entry that their author has not read could change its decision.
--
-- Guarantee: one atomic step. An author decides by the part of the log that it has read. It passes the end of this part, and how
-- many units others may have taken since without changing the decision. If others took more, or changed anything else, the script
-- writes nothing and returns the unread entries, and the author decides again. `word_of` in quota/ledger/log.py is the same rule.
-- If the user lacks a right, the script fails before it writes.
--
-- KEYS  1 log        stream: entries in order, each with one field `e`, its line (quota/rules/entry.py). An id is the time in ms
--                    and a number; the author chooses the first number of a millisecond
--       2 state      hash:
--                    epoch      of this log; ~TOKEN:END_MS while appends are fenced off; !URL after the log has moved
--                    holds      how many of the keys log and corrected must exist: 1, or 2 after a correction; 0 after a union
--                               without entries. If one is missing, the server evicted it, and a repair rebuilds the log
--                    trimmed    the newest entry that moved to the past
--                    longest_ms  the longest window that any caller ever named. The lifetime of the keys is renewed before half
--                               of it is over, and before the rest of it is shorter than this window
--                    view:NAME  a snapshot of a total: EPOCH TOTAL GONE HEAD ... (quota/rules/total.py)
--                    any other  facts, claims, places and refusals (quota/ledger/state.py)
--       3 corrected  hash: key of a charge -> UNITS ID: what it counts since its newest correction, which has this id
--       All have the project as hash tag: quota:{PROJECT}:ledger:log, :state, :corrected; and :past, a stream like the log, of the
--       entries that left it. A replacement is built at KEY:building:TOKEN, and expires after a minute.
--
-- ARGV  1 epoch      of the log that the author has read; '' = an empty log
--       2 seen       the newest entry that the author has read; 0-0 = none
--       3 now_ms     the time of the author's decision
--       4 latest_ms  the latest clock that the author accepts
--       5 room       units that others may have taken; 2^53 = any number
--       6 seq        the first number of a new millisecond
--       7 clock_ms   0 = the server's clock; another value is for tests and simulation
--       8 must       other entries that this log must have, between spaces; '' = none
--       9 new_epoch  the epoch for an empty log
--      10 rooms      replaces `room` for several limits, as JSON: [[UNITS, COUNTS_CALLS, BUCKETS, METHODS, JOBS], ...]; the last
--                    three are lists of names, [] = all; '' = `room` applies
--      then the line of each entry; without a line the script only reads
--
-- Reply {word, clock_ms, epoch, id, whole, ID, LINE, ID, LINE, ...}: `id` is the first appended entry or ''. Then the entries
--       after `seen`, at most 500; `whole` is 1 if these are all. LINE is '' if another program wrote the entry.
--       APPENDED   the entries are in the log, from this try or an earlier one
--       READ       there was nothing to append
--       AGAIN      others changed what the decision depends on
--       CLOCK      the clock is before now_ms or after latest_ms
--       BEHIND     this is another log, it lacks `seen` or any of `must`, or appends are fenced off; the reply has no entries

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local call, match, byte, args = redis.call, string.match, string.byte, ARGV
local epoch, seen, now_ms, latest_ms, room = args[1], args[2], args[3] + 0, args[4] + 0, args[5] + 0
local seq, must, new_epoch, rooms = args[6], args[8], args[9], args[10]

local FIRST_LINE = 11
local MAX_UNSEEN, ANY = 500, 9007199254740992
local FENCE, SEAL, CORRECTION = 126, 33, 99 -- ~ ! c

-- A part that few calls need is included where they need it, because creating its functions takes time.
-- @include parts/clock.lua

local clock_ms = clock(args[7] + 0)
local fields = call('HMGET', state, 'epoch', 'holds', 'longest_ms')
local stored, holds = fields[1] or '', tonumber(fields[2] or 0) or 0
local entries = call('XREVRANGE', log, '+', '-', 'COUNT', 1) -- XRANGE would walk through up to 100 entries before `seen`
if #entries > 0 and entries[1][1] ~= seen then entries = call('XRANGE', log, seen, '+', 'COUNT', MAX_UNSEEN + 2) end
local size = #entries
local oldest, newest = entries[1], entries[size]

-- In most calls the required keys certainly exist: the log has entries, and there are no corrections.
if stored ~= epoch or size == 0 or holds ~= 1 or byte(stored) == FENCE or byte(stored) == SEAL then
-- @include parts/log_standing.lua
  local is_closed
  stored, is_closed = standing(stored, holds)
  if is_closed or (stored ~= epoch and epoch ~= '') then return { 'BEHIND', clock_ms, stored } end
end
local has_seen = size > 0 and oldest[1] == seen
if not has_seen or must ~= '' then
-- @include parts/ids.lua
  local trimmed = call('HGET', state, 'trimmed') or '0-0'
  local function lacks(id) -- a trimmed entry is not lacking
    return before(trimmed, id) and #call('XRANGE', log, id, id) == 0
  end
  local is_behind = not has_seen and seen ~= trimmed
  for id in string.gmatch(must, '%S+') do is_behind = is_behind or lacks(id) end
  if is_behind then return { 'BEHIND', clock_ms, stored } end
end

local first = has_seen and 2 or 1
local whole = size - first < MAX_UNSEEN
local reply = { 'READ', clock_ms, stored, '', whole and 1 or 0 }
local earlier, is_changed = nil, not whole
if size >= first or args[FIRST_LINE] and (room < 0 or rooms ~= '') then
-- @include parts/log_lines.lua
-- @include parts/log_weight.lua
  local own_key = args[FIRST_LINE] and match(args[FIRST_LINE], '^[^\t]*\t([^\t]*)')
  local corrects, limits, taken = {}, rooms ~= '' and cjson.decode(rooms) or { false }, {}
  for at = FIRST_LINE, #args do
    local entry = entry_in(args[at])
    if entry and entry.kind == 'c' then corrects[entry.of] = true end
  end
  is_changed = is_changed or (epoch ~= stored and size >= first) -- another author began the log
  for at = first, math.min(size, first + MAX_UNSEEN - 1) do
    local id, line = entries[at][1], line_of(entries[at])
    reply[#reply + 1] = id
    reply[#reply + 1] = line or ''
    local entry = entry_in(line)
    if entry and entry.kind ~= 'm' then
      if entry.key == own_key then earlier = earlier or id end
      if entry.kind == 'c' and corrects[entry.of] then is_changed = true end
      for n, limit in ipairs(limits) do taken[n] = (taken[n] or 0) + weight(entry, limit) end
    elseif room < ANY then
      is_changed = true
    end
  end
  for n, limit in ipairs(limits) do
    if room < ANY and (taken[n] or 0) > (limit and limit[1] or room) then is_changed = true end
  end
end
if not args[FIRST_LINE] then return reply end
if earlier then
  reply[1], reply[4] = 'APPENDED', earlier
elseif clock_ms < now_ms or clock_ms > latest_ms then
  reply[1] = 'CLOCK'
elseif is_changed then
  reply[1] = 'AGAIN'
end
if reply[1] ~= 'READ' then return reply end

-- New ids follow the newest entry; in an empty log, the newest trimmed entry.
local last = size > 0 and newest[1] or holds > 0 and call('HGET', state, 'trimmed') or '0-0'
-- @include parts/next_id.lua
local ms, first_seq = next_id(last, clock_ms, seq)
local ids, notes = {}, { 'HSET', corrected }
for at = FIRST_LINE, #args do
  local id = ms .. '-' .. int(first_seq + at - FIRST_LINE)
  ids[at] = id
  if byte(args[at]) == CORRECTION then
-- @include parts/log_lines.lua
    local entry = entry_in(args[at])
    if entry then
      notes[#notes + 1] = entry.of
      notes[#notes + 1] = int(entry.units) .. ' ' .. id
    end
  end
end
-- @include parts/log_lifetime.lua
local is_noted = #notes > 2
local must_hold = is_noted and 2 or math.max(holds, 1)
local longest_ms = whole(fields[3]) or 0
local lives_on = must_hold ~= holds or call('PTTL', log) < math.max(longest_ms, lifetime_ms(longest_ms) / 2)
if lives_on or is_noted then
-- @include parts/log_rights.lua
  try_rights()
end
if is_noted then call(unpack(notes)) end
if lives_on then
  if stored == '' then stored = new_epoch end
  call('HSET', state, 'epoch', stored, 'holds', must_hold)
end
for at = FIRST_LINE, #args do call('XADD', log, ids[at], 'e', args[at]) end
if lives_on then live_on() end
reply[1], reply[3], reply[4] = 'APPENDED', stored, ids[FIRST_LINE]
return reply
