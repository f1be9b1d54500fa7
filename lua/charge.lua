-- charge.lua: decide whether a call, or several together, may leave, and charge it.
--
-- Guarantee: one atomic step over all limits that the call names. An admitted charge is in the log when this returns; a refusal
-- and a peek change nothing but how far the views have read. The views read at most 250 log entries: where there are more, the
-- script saves its progress and answers MORE (call again with the same arguments). Arguments that cannot be right are an
-- error, and nothing is written. Those of the limits are looked at where there is something to compare.
--
-- The rules have numbers (L1, L2, ...) in docs/ledger-rules.md.
--
-- Redis takes nothing back when a script fails (L22). So the log is written last; if that fails, the script puts the state
-- back. Housekeeping comes after that, and may fail without a word.
--
-- KEYS  1 log          stream: one entry a charge, fields u m j g k (units, method, job, region, idempotency key)
--       2 state        hash:
--                      format               of everything stored here (L24)
--                      last                 the log's last id
--                      view:VIEW            total, tail, head, dropped_through_ms of each view (L3)
--                      retention_ms         how long the log is kept (L12)
--                      trimmed_through_ms   the log, or its corrections, may lack entries up to here (L13, L14)
--                      maintained_ms        when housekeeping ran last; 0 while there is more to trim (L23)
--                      has_corrections      1 while the key `corrections` must be there
--                      retried:KEY          when the retry with this idempotency key was answered (L16)
--                      epoch                the idempotency key of the first charge, until a loss or a repair begins a new
--                                           one (L18, L26)
--                      unlogged:VIEW        what the ledger lost and still counts (L17; see quota/ledger/unlogged.py)
--                      unlogged_until_ms    until when any of that counts
--                      repaid:MACHINE       the last number repaid, and repaid_at:MACHINE, when (L19; see repay.lua)
--                      granted              what upstream says it grants, BUCKET=UNITS:SINCE_MS:UNTIL_MS;... (L28)
--                      closed:BUCKET        an exhaustion, or, lifted, reopened:BUCKET (L20; see exhaust.lua)
--                      claim:JOB            whose the regions of a job are, and which ticks were run (L25)
--                      place:NAME|REGION    where a job stands in a region, behind the time until which it is kept (L31)
--                      compared             what upstream counted when somebody compared last
--                      repaired             the marks of repairs; repairing: how far one has come (L26; see repair.lua)
--                      fence, fenced_epoch, move, filled   while the ledger moves, and afterwards (L27; see fence.lua)
--                      housekeeping_cursor  how far housekeeping has come in this hash (L23)
--                      eviction_checked_ms  when the server was last asked whether it may evict keys
--                      rolled_up            the last charge that the history has (L29; see roll_up.lua)
--       3 corrections  hash: id -> the units that a corrected charge counts now (L15)
--       All three carry the project as hash tag: quota:{PROJECT}:log, :state, :corrections
--
-- ARGV  1 now_ms           0 = the server's clock; anything else is for tests and simulation
--       2 caller_ms        the caller's clock, the second witness; 0 = none
--       3 commit           1 = charge, 0 = peek
--       4 u                what to charge: a bare integer in bucket `units`, else BUCKET=N
--       5 method   6 job   7 region
--       8 idempotency_key  unique to this attempt, without spaces, @ or /, and not -. With 2 to 100 lines, for as many charges,
--                          all of which are made or none, one behind the other in the log: 4 to 7 have as many lines, one for each
--       9 retry_age_ms     -1 on the first try of this call; on a retry after a lost answer, the age of the first try
--      10 retention_ms     how long the log must be kept: for the longest window of all limits that the caller knows of,
--                          whether this call names them or not. The longest that anybody named counts
--      11 jitter_ms        added to the end of an exhaustion, so that machines do not come back all at once
--      12 closed_by        names whose exhaustion closes this call, comma-joined (may be empty)
--      13 expected         what the caller has seen of this ledger: its epoch, then ids of the log, spaces between. Empty =
--                          nothing, and a ledger that was emptied or restored from an old copy is not noticed. A last
--                          word ` @GRANTS`: the field `granted` as the caller knows it, by which it lowered its caps
--      then four for each limit:
--         view             what it counts: BUCKETS|METHODS|JOBS|WINDOW, then |calls where it counts calls, not units.
--                          A list is * for all, or names joined by commas (a % , | or * inside a name is %25 %2C %7C %2A)
--         cap              the number it may not exceed
--         cost             what this charge adds to it: its units, or 1 where the view counts calls; a peek may ask 0. Of
--                          several charges, the sum of what the view counts of them
--         span             sliding: the window in ms. calendar: three edges in ms, "previous next next-but-one"
--
-- Reply one line of text, words with a space between: OUTCOME ID NOW_MS LAST EPOCH USED...
--       OUTCOME     ADMITTED, REFUSED, EXHAUSTED,
--                   CLOCK (the clocks disagree; nothing was compared), MORE (call again), RETRIED (a late first try: its
--                   retry was answered already), BEHIND (this ledger lacks what the caller expects; nothing was compared:
--                   whoever knows what is missing reports it, `quota status` for example; then call again),
--                   GRANTED (upstream grants other numbers than the caller knows; nothing was compared: lower the caps, then
--                   call again)
--       ID          of the charge; - when nothing was charged. Of several charges, all ids in their order, commas between
--       NOW_MS      the moment at which the windows end; with CLOCK the server's clock
--       LAST        the id of the newest entry, 0-0 in an empty log
--       EPOCH       of this ledger; - before its first charge
--       USED        a word for each limit, in their order, where they were compared: with this charge if it was admitted, and
--                   with unlogged usage. Of REFUSED follows another one for each: the ms of the charge that must leave its
--                   window before the call fits, or, where unlogged usage expires then, of a charge that would leave with it;
--                   - where it did not refuse, its window does not slide, or the log must be read for it: it lacks a part of
--                   the window, or more than 250 entries leave before there is room
--       Seldom a line for each of these follows, after its name and a space:
--       exhaustion  the record, of EXHAUSTED (see exhaust.lua)
--       granted     of GRANTED, what upstream grants: the field of the state
--       unlogged    "N EPOCH EXPIRIES KEPT LAST EPOCH ..." (quota/ledger/unlogged.py): of the limit N, the first is 1
--       evicts      once a day: the server's maxmemory-policy if that lets it drop our keys, ? if it may not be seen

local log, state, corrections = KEYS[1], KEYS[2], KEYS[3]
local call, match, find, args = redis.call, string.match, string.find, ARGV
local commit, u, method, job, region, idempotency_key = args[3] == '1', args[4], args[5], args[6], args[7], args[8]
local clock_ms, caller_ms, retry_age_ms = tonumber(args[1]), tonumber(args[2]), tonumber(args[9])
local retention_ms, jitter_ms, closed_by, expected = tonumber(args[10]), tonumber(args[11]), args[12], args[13]

local FIRST_LIMIT, LIMIT_SIZE = 14, 4
local FIRST_CLOSED, FIELDS_BEFORE = 13, 2 -- in `fields`, whose first two words are of the command
local RETENTION_SLACK_MS = 90000000 -- 25 h (L12, L17): should the clock go back, what has expired counts again
local MAX_SEQ = 9007199254740991
local CHUNK, MAX_ENTRIES = 250, 250 -- L21
local MAX_BEFORE, MAX_LOOKED = 1000, 10000 -- L16
local MAX_UNITS = 1000000000 -- for one charge: sums of a whole log stay exact in 53 bits
local MAX_CHARGES = 100
local LATEST_MS = 100000000000000
local MAX_LIMITS = 1000 -- and exhaustions: one command takes 8,000 words from a script
local RETRIED_KEPT_MS = 300000 -- L16
local CHECK_EVICTION_EVERY_MS = 86400000
local HISTORY_MS = 3024000000 -- 35 days (L29)
local MAINTENANCE_EVERY_MS = 60000 -- L23

-- A part that few calls need stands where they do: to make its functions takes time.
-- @include parts/int.lua
-- @include parts/ids.lua
-- @include parts/clock.lua
-- @include parts/clocks_agree.lua
-- @include parts/format.lua
-- @include parts/bucket_and_units.lua
-- @include parts/what_a_view_counts.lua

-- A number that is none would be compared with, or written to the log, and count wrongly for everybody.
local function wrong(what) return redis.error_reply('ERR charge.lua: ' .. what) end
if #KEYS ~= 3 or #args < FIRST_LIMIT - 1 or (#args - FIRST_LIMIT + 1) % LIMIT_SIZE ~= 0 then
  return wrong('3 keys and 13 arguments are needed, then 4 for each limit')
elseif #args > FIRST_LIMIT - 1 + MAX_LIMITS * LIMIT_SIZE then
  return wrong('more than ' .. MAX_LIMITS .. ' limits')
elseif not (clock_ms and caller_ms and retry_age_ms and jitter_ms and retention_ms) or not (
  clock_ms >= 0 and clock_ms <= LATEST_MS and caller_ms >= 0 and caller_ms <= MAX_SEQ and retry_age_ms >= -1
  and retry_age_ms <= MAX_SEQ and retention_ms >= 1 and retention_ms <= LATEST_MS and jitter_ms >= 0 and jitter_ms <= MAX_SEQ
) then -- nan is neither
  return wrong('now_ms, caller_ms, retry_age_ms, retention_ms (1 or more) and jitter_ms are numbers')
elseif not commit and args[3] ~= '0' then
  return wrong('commit is 1 or 0')
end
local charges, units, counted_together = nil, nil, nil
if not find(idempotency_key, '\n', 1, true) then
  local digits = match(u, '^%d+$') or match(u, '=(%d+)$')
  units = digits and digits + 0
else
-- @include parts/several_charges.lua
  charges, units, counted_together = several_charges(u, method, job, region, idempotency_key)
  if not charges or #charges > MAX_CHARGES then
    return wrong('several charges are at most ' .. MAX_CHARGES .. ', each with a line in u, method, job, region and key')
  end
  u, method, job, region, idempotency_key = unpack(charges[1])
end
if not units or (not charges and units > MAX_UNITS) then return wrong('u is N or BUCKET=N, with N from 0 to ' .. int(MAX_UNITS)) end
for index = 1, commit and (charges and #charges or 1) or 0 do
  local key = charges and charges[index][5] or idempotency_key
  if not find(key, '^[^%s@/]+$') or key == '-' then
    return wrong('a charge needs an idempotency key without spaces, @ or /, and not -')
  end
end
-- Changes nothing, and fails where a charge would, as on a replica: a peek promises no more than that.
if not commit then call('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v') end

-- What is text already stays text: to make a number into text takes as long as a small call.
local clock_text
clock_ms, clock_text = clock(clock_ms)
if not clocks_agree(clock_ms, caller_ms) then return 'CLOCK - ' .. clock_text .. ' 0-0 -' end
-- L11. Charges expire by whichever clock is behind, so that no single clock running ahead frees budget.
local now_ms, now = clock_ms, clock_text
if caller_ms > 0 and caller_ms + CLOCK_SLACK_MS < now_ms then
  now_ms = caller_ms + CLOCK_SLACK_MS
  now = int(now_ms)
end

-- One read fetches everything the decision needs. A table that grows costs as much, so there is room for a few words more.
local fields = {
  'HMGET', state, 'last', 'epoch', 'format', 'granted', 'unlogged_until_ms', 'has_corrections', 'trimmed_through_ms',
  'retention_ms', 'maintained_ms', 'retried:' .. idempotency_key, false, false, false, false,
}
local size = FIRST_CLOSED - 1
if find(closed_by, ',', 1, true) then
  for name in string.gmatch(closed_by, '[^,]+') do
    size = size + 1
    fields[size] = 'closed:' .. name
  end
elseif closed_by ~= '' then
  size = size + 1
  fields[size] = 'closed:' .. closed_by
end
local last_closed = size
if last_closed - FIRST_CLOSED >= MAX_LIMITS then return wrong('more than ' .. MAX_LIMITS .. ' names in closed_by') end
for at = FIRST_LIMIT, #args, LIMIT_SIZE do
  size = size + 1
  fields[size] = 'view:' .. args[at]
end
local known = call(unpack(fields, 1, size))
local last, epoch, granted, has_corrections, retried = known[1], known[2] or '-', known[4] or '', known[6] == '1', known[10]
local unknown_format = other_format(known[3], epoch)
if unknown_format then return unknown_format end
-- A number of the state: 0 where there is none, or one that cannot be right.
local function number(field)
  local n = field and tonumber(field) or 0
  return n >= 0 and n <= LATEST_MS and n or 0
end
local unlogged_until_ms, trimmed_through_ms = number(known[5]), number(known[7])
local stored_retention_ms, maintained_ms = number(known[8]), number(known[9])
-- What is to be set in the state: field, value, field, value; up to `set`.
local dirty, set = { 'HSET', state, false, false, false, false, false, false }, 2
if not last then -- L14: before the first charge, or the state was evicted: it is made again from the other two
-- @include parts/from_other_keys.lua
  local kept_ms
  last, kept_ms, has_corrections = from_other_keys()
  stored_retention_ms = math.max(stored_retention_ms, kept_ms)
  if has_corrections then
    set = set + 2
    dirty[set - 1], dirty[set] = 'has_corrections', '1'
  end
end
local last_ms, last_seq = split(last)
-- L14. Without its corrections the log says too much: it no longer tells how much leaves a window.
if has_corrections and call('EXISTS', corrections) == 0 then
  has_corrections, trimmed_through_ms = false, math.max(trimmed_through_ms, last_ms)
  set = set + 2
  dirty[set - 1], dirty[set] = 'has_corrections', '0'
  set = set + 2
  dirty[set - 1], dirty[set] = 'trimmed_through_ms', int(trimmed_through_ms)
end

-- @include parts/what_it_counts_of_an_entry.lua

-- What the caller has seen, which costs one that saw the newest entry and the grants one comparison only.
local charged_before
if expected ~= '' and expected ~= epoch .. ' ' .. last .. ' @' .. granted and expected ~= epoch .. ' ' .. last
  or retry_age_ms >= 0
then
  local its_words, its_grants = match(expected, '^(.*) @(%S*)$')
  its_words = its_words or expected
  local its_epoch, its_ids = match(its_words, '^(%S+)(.*)$')
  if commit and retry_age_ms >= 0 then -- of a call whose answer was lost: if the first try did arrive, its charge is the answer
-- @include parts/first_try.lua
    local newest_seen, keys = nil, {}
    for id in string.gmatch(its_epoch == epoch and its_ids or '', '%d+%-%d+') do
      if not newest_seen or before(newest_seen, id) then newest_seen = id end
    end
    for index = 1, charges and #charges or 1 do keys[index] = charges and charges[index][5] or idempotency_key end
    local asked_ms = math.min(clock_ms - retry_age_ms, caller_ms > 0 and caller_ms or clock_ms) -- it may come late, too
    charged_before = first_try(log, keys, asked_ms, newest_seen)
  end
  -- L18. Behind: the epoch is not the expected one, or an entry is missing that was neither trimmed nor lost with the whole
  -- log (then the views still know of it).
  local behind = its_words ~= '' and its_epoch ~= '-' and its_epoch ~= epoch
  for id in string.gmatch(its_epoch == epoch and its_ids or '', '%S+') do
    if id ~= last and (split(id) or 0) > trimmed_through_ms and #call('XRANGE', log, id, id) == 0 then
      behind = not known[1] or call('EXISTS', log) == 1
      break
    end
  end
  local unlike = behind and 'BEHIND' or its_grants and its_grants ~= granted and 'GRANTED'
  if unlike and not charged_before then
    -- L28. The caps are the caller's: it must have made them from what upstream grants now.
    return unlike .. ' - ' .. now .. ' ' .. last .. ' ' .. epoch .. (behind and '' or '\ngranted ' .. granted)
  end
end
-- L16. The key of a retry stays behind for a first try that is still under way.
if commit and retry_age_ms < 0 and retried then return 'RETRIED - ' .. now .. ' ' .. last .. ' ' .. epoch end

-- L4, first half: bring each view up to the log's end, drop what has left its window, and compare. `more` is the place of the
-- first that has more to read.
local views, touched, more, fits, lines = {}, 0, false, true, ''
for at = FIRST_LIMIT, #args, LIMIT_SIZE do
  local name, cap, cost, span = args[at], tonumber(args[at + 1]), tonumber(args[at + 2]), args[at + 3]
  local window_ms, place = tonumber(span), (at - FIRST_LIMIT) / LIMIT_SIZE + 1
  local cutoff_ms -- L5: entries at or before this are out of the window
  if not (cap and cap >= -MAX_SEQ and cap <= MAX_SEQ and cost and cost >= 0 and cost <= MAX_SEQ) then
    return wrong('cap and cost of ' .. name .. ' are numbers')
  elseif commit and charges and cost ~= counted_together(name) then
    return wrong('the cost of ' .. name .. ' is the sum of what it counts of the charges')
  elseif commit and not charges and cost ~= units and not (cost == 1 and find(name, '|calls$')) then
    return wrong('the cost of ' .. name .. ' is the units charged, or 1 where it counts calls')
  elseif window_ms then
    if not (window_ms >= 1 and window_ms <= retention_ms) then return wrong('span of ' .. name .. ' is 1 to retention_ms') end
    cutoff_ms = now_ms - window_ms
  else
    local previous, next_edge, next_but_one = match(span, '^(%d+) (%d+) (%d+)$')
    previous, next_edge, next_but_one = tonumber(previous), tonumber(next_edge), tonumber(next_but_one)
    if not previous then return wrong('span of ' .. name .. ' is a window in ms, or three edges') end
    if now_ms < previous or now_ms >= next_but_one then
      return 'CLOCK - ' .. clock_text .. ' ' .. last .. ' ' .. epoch
    end
    cutoff_ms = (now_ms >= next_edge and next_edge or previous) - 1
  end
  if cutoff_ms < 0 then cutoff_ms = 0 end

  local stored = known[last_closed - FIELDS_BEFORE + place]
  local total, tail, tail_ms, head, dropped_through = match(stored or '', '^(%d+) ((%d+)%-%d+) (%d+%-%d+) (%d+)$')
  local head_ms = head and (head == last and last_ms or split(head))
  if total then total, tail_ms = total + 0, tail_ms + 0 end
  if not total and not find(name, '^[^|]*|[^|]*|[^|]*|.') then
    return wrong('the view ' .. name .. ' is not BUCKETS|METHODS|JOBS|WINDOW')
  end
  -- L14. Where the log lacks a part of this window, or its corrections, the view knows more than the log: its total stands
  -- until that part is out of the window, and is then taken afresh.
  local whole = trimmed_through_ms <= cutoff_ms
  -- L6, L13. Missing, or the clock went back behind what was dropped, or all that it counts has expired, or the log no
  -- longer has what it would have to drop: start afresh.
  local afresh = not total or head_ms <= cutoff_ms
  if not afresh and (dropped_through + 0 > cutoff_ms or (whole and tail_ms <= trimmed_through_ms)) then
    afresh = not known[1] or call('EXISTS', log) == 1
    if not afresh then -- it was deleted or evicted, and nobody has charged since
      whole, trimmed_through_ms = false, math.max(trimmed_through_ms, last_ms)
      set = set + 2
      dirty[set - 1], dirty[set] = 'trimmed_through_ms', int(trimmed_through_ms)
    end
  end
  if afresh then
    total, tail_ms, dropped_through = 0, cutoff_ms + 1, int(cutoff_ms)
    tail, head = int(tail_ms) .. '-0', dropped_through .. '-' .. int(MAX_SEQ)
  end

  if not more and (head ~= last or tail_ms <= cutoff_ms) then
    local counts, size = nil, nil
    while not more and head ~= last and before(head, last) do -- L7
      size = math.min(CHUNK, MAX_ENTRIES - touched)
      counts = counts or counter_of_entries(name)
      local entries = size > 0 and call('XRANGE', log, '(' .. head, last, 'COUNT', size) or {}
      for _, entry in ipairs(entries) do
        total = total + counts(entry)
        head = entry[1]
      end
      touched, more = touched + #entries, size == 0 and place
      if #entries < size then head = last end
    end
    if tail_ms <= cutoff_ms and not whole then
      tail_ms, tail = cutoff_ms + 1, int(cutoff_ms + 1) .. '-0'
    end
    size = 2
    while not more and tail_ms <= cutoff_ms do -- L8
      size = math.min(size, MAX_ENTRIES - touched)
      counts = counts or counter_of_entries(name)
      local entries = size > 0 and call('XRANGE', log, tail, '+', 'COUNT', size) or {}
      for _, entry in ipairs(entries) do
        tail, tail_ms = entry[1], split(entry[1]) -- the next one to drop, so that nothing is read again before its time
        if tail_ms > cutoff_ms then break end
        total, dropped_through = total - counts(entry), int(tail_ms)
      end
      touched, more = touched + #entries, size == 0 and place
      if #entries < size and tail_ms <= cutoff_ms then -- none is left
        tail_ms, tail = cutoff_ms + 1, int(cutoff_ms + 1) .. '-0'
      elseif size > 0 and tail_ms <= cutoff_ms then
        local ms, seq = split(tail)
        tail = int(ms) .. '-' .. int(seq + 1)
      end
      size = size * 2
    end
  end

  -- L17. What was lost counts until all of it would have expired.
  local unlogged, expiries = 0, nil
  if unlogged_until_ms > now_ms then
    local reports = call('HGET', state, 'unlogged:' .. name)
    if reports then lines = lines .. '\nunlogged ' .. place .. ' ' .. reports end
    expiries = {}
    for parts in string.gmatch(reports or '', '%S+ (%S+) %S+ %S+') do
      for unlogged_units, until_ms in string.gmatch(parts, '(%d+):(%d+)') do
        if tonumber(until_ms) > now_ms then
          unlogged = unlogged + tonumber(unlogged_units)
          expiries[#expiries + 1] = { ms = tonumber(until_ms), units = tonumber(unlogged_units) }
        end
      end
    end
  end
  -- L9: compare
  local has_room = cost == 0 or total + unlogged + cost <= cap
  fits = fits and has_room
  views[place] = {
    total = total, tail = tail, head = head, dropped_through = dropped_through, cost = cost, unlogged = unlogged,
    expiries = expiries, leaving_ms = not has_room and whole and window_ms,
  }
end

-- L20. A bucket that is closed says more than a limit that is full.
local outcome, exhaustion, exhausted_ms = fits and 'ADMITTED' or 'REFUSED', nil, now_ms - jitter_ms
for index = FIRST_CLOSED - FIELDS_BEFORE, last_closed - FIELDS_BEFORE do
  local until_ms = known[index] and (tonumber(match(known[index], '^%d+')) or MAX_SEQ)
  if until_ms and until_ms > exhausted_ms then
    outcome, exhaustion, exhausted_ms = 'EXHAUSTED', known[index], until_ms
  end
end
if more or charged_before then outcome, exhaustion = more and 'MORE' or 'ADMITTED', nil end
if exhaustion then lines = '\nexhaustion ' .. exhaustion .. lines end
local leaving = ''
if outcome == 'REFUSED' then
-- @include parts/when_there_is_room.lua
  for index, view in ipairs(views) do
    local at, word, read = FIRST_LIMIT + (index - 1) * LIMIT_SIZE, '-', 0
    if view.leaving_ms then
      word, read = when_there_is_room(view, counter_of_entries(args[at]), args[at + 1] - view.cost, MAX_ENTRIES - touched)
    end
    leaving, touched = leaving .. ' ' .. word, touched + read
  end
end

local admitted, id, newest = outcome == 'ADMITTED' and commit and not charged_before, '-', last
local ids = charged_before
if admitted then -- L10
  if clock_ms > last_ms then newest = clock_text .. '-0' else newest = int(last_ms) .. '-' .. int(last_seq + 1) end
  id = newest
  if charges then
    local ms, seq = split(newest)
    ids = {}
    for index = 1, #charges do ids[index] = int(ms) .. '-' .. int(seq + index - 1) end
    newest = ids[#ids]
  end
  set = set + 2
  dirty[set - 1], dirty[set] = 'last', newest
end
if ids then id = table.concat(ids, ',') end
if commit and retry_age_ms >= 0 and not more then
  set = set + 2
  dirty[set - 1], dirty[set] = fields[FIRST_CLOSED - 1], clock_text
end
local used = ''
for index = more or #views, 1, -1 do -- two limits may share a view, and the first of them has come further: it is written last
  local view, stored = views[index], known[last_closed - FIELDS_BEFORE + index]
  local total = admitted and view.total + view.cost or view.total
  local total_text = int(total)
  local text = total_text .. ' ' .. view.tail .. ' ' .. (admitted and newest or view.head) .. ' ' .. view.dropped_through
  if text ~= stored then
    set = set + 2
    dirty[set - 1], dirty[set] = fields[last_closed + index], text
  end
  used = ' ' .. (view.unlogged == 0 and total_text or int(total + view.unlogged)) .. used
end
if more then used, lines = '', '' end

-- L22: write the state, and then the entry.
local function live_ms() -- L12
  return int(math.max(stored_retention_ms, HISTORY_MS, unlogged_until_ms + RETENTION_SLACK_MS - now_ms))
end
local minute_ms = clock_ms - clock_ms % MAINTENANCE_EVERY_MS
local due = set > 2 and (maintained_ms < minute_ms or maintained_ms >= minute_ms + MAINTENANCE_EVERY_MS
  or retention_ms > stored_retention_ms or not known[1])
if due then
  -- A user that lacks any right, or a server without memory, is refused. The latter is asked first: what follows other writes
  -- gets it.
  local tried = redis.pcall('HSET', KEYS[2] .. ':none', 'f', 'v', 'without a value')
  if find(tried.err, 'OOM', 1, true) then return tried end
-- @include parts/rights.lua
  local missing = missing_rights()
  if #missing > 0 then return redis.error_reply('NOPERM this user may not run ' .. table.concat(missing, ', ')) end
  stored_retention_ms = math.max(stored_retention_ms, retention_ms)
  call('HSET', state, 'format', FORMAT, 'retention_ms', int(stored_retention_ms))
  for _, key in ipairs(KEYS) do call('PEXPIRE', key, live_ms()) end
end
if set > 2 then call(unpack(dirty, 1, set)) end
local log_is_new = false
if admitted then
  local refused, first_id = nil, charges and ids[1] or id
  local there = redis.pcall('XADD', log, 'NOMKSTREAM', first_id, 'u', u, 'm', method, 'j', job, 'g', region, 'k', idempotency_key)
  if not there then
    refused = redis.pcall('PEXPIRE', state, live_ms()) -- as it will be for the log
  elseif type(there) == 'table' then
    refused = there
  end
  if type(refused) == 'table' then
    call('HSET', state, 'last', last)
    for index = last_closed + 1, size do
      local field, stored = fields[index], known[index - FIELDS_BEFORE]
      if stored then call('HSET', state, field, stored) else call('HDEL', state, field) end
    end
    return refused
  end
  if not there then
    log_is_new = true
    call('XADD', log, first_id, 'u', u, 'm', method, 'j', job, 'g', region, 'k', idempotency_key)
    call('PEXPIRE', log, live_ms())
    if known[1] then -- L14: it was deleted or evicted: what the views counted of it still counts
      trimmed_through_ms = last_ms
      call('HSET', state, 'trimmed_through_ms', int(trimmed_through_ms))
    end
  end
  for index = 2, charges and #charges or 1 do -- where the first may be appended, all may
    local its_u, its_method, its_job, its_region, its_key = unpack(charges[index])
    call('XADD', log, ids[index], 'u', its_u, 'm', its_method, 'j', its_job, 'g', its_region, 'k', its_key)
  end
  if epoch == '-' then
    epoch = idempotency_key
    call('HSET', state, 'epoch', epoch)
  end
end
if not more and (due or log_is_new or (set > 2 and retry_age_ms >= 0)) then
  if log_is_new and type(redis.pcall('DEL', corrections)) ~= 'table' then call('HSET', state, 'has_corrections', '0') end
-- @include parts/housekeeping.lua
  local policy =
    keep_house(clock_ms, now_ms, last_ms, stored_retention_ms, trimmed_through_ms, unlogged_until_ms, has_corrections)
  if policy then lines = lines .. '\nevicts ' .. policy end
end
return outcome .. ' ' .. id .. ' ' .. now .. ' ' .. newest .. ' ' .. epoch .. used .. leaving .. lines
