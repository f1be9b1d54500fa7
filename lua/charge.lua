-- charge.lua: decide whether one call may leave, and charge it.
--
-- Guarantee: one atomic step over all limits asked about. An admitted charge is in the log when this returns; a refusal
-- and a peek change nothing but how far the views have read. The views read at most 1,000 log entries: where more must
-- be read, progress is saved and the answer is MORE (ask again with the same arguments). Arguments that cannot be right
-- are an error, and nothing is written.
--
-- Redis takes nothing back when a script fails. So the log is written last; where it cannot be, the state is put back.
-- Housekeeping comes after that, and may fail without a word.
--
-- KEYS  1 log      stream: one entry a charge, fields u m j g t (units, method, job, region, token)
--       2 state    hash: last = the log's last id; keep_ms; cut_ms = up to here the log, or its corrections, were trimmed or lost;
--                  repeat:TOKEN = when its repeat was answered; swept = how far housekeeping has come;
--                  closed:BUCKET, reopened:BUCKET; one field for each view: total, tail, head, gone_ms = the newest time
--                  dropped; corrected = 1 while `amended` must be there; looked_ms = when the server was last looked at;
--                  epoch = the token of the first charge, until a loss begins a new one; carry:VIEW = what the ledger
--                  lost (see carry.lua), carried_ms = until when any of that counts
--       3 amended  hash: id -> the units a corrected charge counts now
--       All three carry the project as hash tag: quota:{PROJECT}:log, :state, :amended
--
-- ARGV  1 now_ms        0 = the server's clock; anything else is for tests and simulation
--       2 caller_ms     the caller's clock, the second witness; 0 = none
--       3 commit        1 = charge, 0 = peek
--       4 u             what to charge: a bare integer in bucket `units`, else BUCKET=N
--       5 method   6 job   7 region
--       8 token         unique to this attempt, without spaces, @ or /
--       9 retry_age_ms  -1 on the first try of this call; on a repeat after a lost answer, the age of the first try
--      10 keep_ms       how long the log must be kept: for the longest window of all limits that the caller knows of,
--                       whether it asks about them here or not. The longest that anybody named counts
--      11 jitter_ms     added to the end of an exhaustion, so that machines do not come back all at once
--      12 closed_by     names whose exhaustion closes this call, comma-joined (may be empty)
--      13 seen          what the caller has seen of this ledger: its epoch, then ids of the log, spaces between. Empty =
--                       nothing, and a ledger that was emptied or restored from an old copy is not noticed
--      then four for each limit:
--         view          what it counts: BUCKETS|METHODS|JOBS|WINDOW, then |calls where it counts calls, not units.
--                       A field is * for all, or names joined by commas (a % , | or * inside a name is %25 %2C %7C %2A)
--         cap           the number it may not exceed
--         cost          what this charge adds to it: its units, or 1 where the view counts calls; a peek may ask 0
--         span          sliding: the window in ms. calendar: three edges in ms, "previous next next-but-one"
--
-- Reply { outcome, id, now_ms, last, exhaustion, epoch, carried, used... }
--       outcome     ADMITTED, REFUSED, EXHAUSTED (its record is in `exhaustion`), CLOCK (the clocks disagree; nothing
--                   was compared), MORE (ask again), REPEAT (a late original: its repeat was answered already), BEHIND
--                   (this ledger has not what was seen of it; nothing was compared: carry.lua, then ask again)
--       id          of the charge; empty when nothing was charged
--       now_ms      the moment at which the windows end; with CLOCK the server's clock
--       last        the id of the newest entry, 0-0 in an empty log
--       epoch       of this ledger; empty before its first charge
--       carried     a line for each limit, "EPOCH PARTS KEPT LAST EPOCH ..." (see carry.lua); empty if nothing is
--       used...     for each limit, in the order asked, including this charge if it was admitted and what is carried
--       Behind them, once a day: the server's maxmemory-policy if that lets it drop our keys, "?" if it may not be seen

local log, state, amended = KEYS[1], KEYS[2], KEYS[3]
local caller_ms = tonumber(ARGV[2])
local commit = ARGV[3] == '1'
local u, method, job, region, token = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local retry_age_ms = tonumber(ARGV[9])
local keep_ms, jitter_ms, closed_by, seen = tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12], ARGV[13]

local FIRST_LIMIT, LIMIT_SIZE = 14, 4
local FIRST_USED = 8
local CLOCK_SLACK_MS = 5000
local KEEP_SLACK_MS = 90000000 -- 25 h: should the clock go back, what has expired counts again
local MAX_SEQ = 9007199254740991
local CHUNK, MOST_ENTRIES = 250, 1000
local MOST_UNITS = 1000000000 -- for one charge: sums of a whole log stay exact in 53 bits
local LATEST_MS = 100000000000000
local MOST_LIMITS = 1000 -- and exhaustions: one command takes 8,000 words from a script
local REPEAT_KEPT_MS = 300000
local LOOK_EVERY_MS = 86400000

local function int(n) return string.format('%.0f', n) end

-- A number that is none would be compared with, or written to the log, and count wrongly for everybody.
local function wrong(what) return redis.error_reply('ERR charge.lua: ' .. what) end
local clock_ms, units = tonumber(ARGV[1]), tonumber(string.match(u or '', '^%d+$') or string.match(u or '', '=(%d+)$'))
if #KEYS ~= 3 or #ARGV < FIRST_LIMIT - 1 or (#ARGV - FIRST_LIMIT + 1) % LIMIT_SIZE ~= 0 then
  return wrong('3 keys and 13 arguments are needed, then 4 for each limit')
elseif (#ARGV - FIRST_LIMIT + 1) / LIMIT_SIZE > MOST_LIMITS then
  return wrong('more than ' .. MOST_LIMITS .. ' limits')
elseif not (clock_ms and caller_ms and retry_age_ms and jitter_ms and keep_ms) or not (
  clock_ms >= 0 and clock_ms <= LATEST_MS and caller_ms >= 0 and caller_ms <= MAX_SEQ and retry_age_ms >= -1
  and retry_age_ms <= MAX_SEQ and keep_ms >= 1 and keep_ms <= LATEST_MS and jitter_ms >= 0 and jitter_ms <= MAX_SEQ
) then -- nan is neither
  return wrong('now_ms, caller_ms, retry_age_ms, keep_ms (1 or more) and jitter_ms are numbers')
elseif not commit and ARGV[3] ~= '0' then
  return wrong('commit is 1 or 0')
elseif not units or units > MOST_UNITS then
  return wrong('u is N or BUCKET=N, with N from 0 to ' .. int(MOST_UNITS))
elseif commit and not string.find(token, '^[^%s@/]+$') then
  return wrong('a charge needs a token without spaces, @ or /')
end

if clock_ms == 0 then
  local time = redis.call('TIME')
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end
-- Charges expire by whichever clock is behind, so that no single clock running ahead frees budget.
local now_ms = clock_ms
if caller_ms > 0 and caller_ms + CLOCK_SLACK_MS < now_ms then now_ms = caller_ms + CLOCK_SLACK_MS end
if caller_ms > clock_ms + CLOCK_SLACK_MS then return { 'CLOCK', '', int(clock_ms), '0-0', '', '', '' } end

-- Ids: "ms-seq", compared by number.
local function split(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function before(a, b)
  local a_ms, a_seq = split(a)
  local b_ms, b_seq = split(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end

-- One read fetches everything the decision needs.
local fields = { 'last', 'repeat:' .. token, 'keep_ms', 'cut_ms', 'epoch', 'carried_ms', 'corrected' }
local closed_first = #fields + 1
for name in string.gmatch(closed_by, '[^,]+') do fields[#fields + 1] = 'closed:' .. name end
local closed_last = #fields
if closed_last - closed_first >= MOST_LIMITS then return wrong('more than ' .. MOST_LIMITS .. ' names in closed_by') end
for at = FIRST_LIMIT, #ARGV, LIMIT_SIZE do
  local name, cap, cost, span = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  local window_ms = tonumber(span)
  if not (cap and cap >= -MAX_SEQ and cap <= MAX_SEQ and cost and cost >= 0 and cost <= MAX_SEQ) then
    return wrong('cap and cost of ' .. name .. ' are numbers')
  elseif commit and cost ~= units and not (cost == 1 and string.find(name, '|calls$')) then
    return wrong('the cost of ' .. name .. ' is the units charged, or 1 where it counts calls')
  elseif window_ms and not (window_ms >= 1 and window_ms <= keep_ms) then
    return wrong('span of ' .. name .. ' is 1 to keep_ms')
  elseif not window_ms and not string.find(span, '^%d+ %d+ %d+$') then
    return wrong('span of ' .. name .. ' is a window in ms, or three edges')
  end
  fields[#fields + 1] = name
end
local known = redis.call('HMGET', state, unpack(fields))
local function number(field)
  local n = field and tonumber(field) or 0
  return n >= 0 and n <= LATEST_MS and n or 0
end
local last, repeated, kept_ms, cut_ms = known[1], known[2], number(known[3]), number(known[4])
local epoch, carried_ms, corrected = known[5] or '', number(known[6]), known[7] == '1'
local dirty = {} -- what is to be set in the state: field, value, field, value
if not last then -- before the first charge, or the state was evicted: it is made again from the other two
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  last = newest[1] and newest[1][1] or '0-0'
  kept_ms = math.max(kept_ms, redis.call('PTTL', log))
  corrected = redis.call('EXISTS', amended) == 1
  if corrected then dirty = { 'corrected', '1' } end
end
local last_ms, last_seq = split(last)
-- Without its corrections the log says too much, and what has left a window can no longer be told from it.
if corrected and redis.call('EXISTS', amended) == 0 then
  corrected, cut_ms = false, math.max(cut_ms, last_ms)
  dirty = { 'corrected', '0', 'cut_ms', int(cut_ms) }
end

-- A repeat of a call whose answer was lost: if the first try did arrive, its charge is the answer.
local charged_before
if commit and retry_age_ms >= 0 then
  local since = int(math.max(0, clock_ms - retry_age_ms - CLOCK_SLACK_MS))
  for _, entry in ipairs(redis.call('XREVRANGE', log, '+', since, 'COUNT', MOST_ENTRIES)) do
    if entry[2][10] == token then charged_before = entry[1] end
  end
end

-- Behind: another epoch than the caller has seen, or an entry is missing that was neither trimmed nor lost with the whole
-- log (then the views still know of it). The first line is all that it costs whoever saw the newest entry.
local function is_behind()
  local seen_epoch, ids = string.match(seen, '^(%S+)(.*)$')
  if seen_epoch ~= epoch then return true end
  for id in string.gmatch(ids, '%S+') do
    if id ~= last and (split(id) or 0) > cut_ms and #redis.call('XRANGE', log, id, id) == 0 then
      return not known[1] or redis.call('EXISTS', log) == 1
    end
  end
  return false
end
if seen ~= '' and seen ~= epoch .. ' ' .. last and not charged_before and is_behind() then
  return { 'BEHIND', '', int(now_ms), last, '', epoch, '' }
end

-- What a view counts of one entry. The view's name says what it selects; it is read only where others' entries are.
local function counter(view)
  local function names_of(list)
    if list == '*' then return nil end
    local set = {}
    for name in string.gmatch(list .. ',', '([^,]*),') do
      set[string.gsub(name, '%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end)] = true
    end
    return set
  end
  local buckets, methods, jobs, rest = string.match(view, '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
  buckets, methods, jobs = names_of(buckets), names_of(methods), names_of(jobs)
  local calls = string.find(rest, '|calls', 1, true)
  return function(entry)
    local f = entry[2]
    local bucket, units = string.match(f[2], '^(.*)=(%d+)$')
    if not bucket then bucket, units = 'units', f[2] end
    if buckets and not buckets[bucket] then return 0 end
    if methods and not methods[f[4]] then return 0 end
    if jobs and not jobs[f[6]] then return 0 end
    units = math.max(0, tonumber(corrected and redis.call('HGET', amended, entry[1]) or units))
    if calls then return units > 0 and 1 or 0 end
    return units
  end
end

-- Bring each view up to the log's end and drop what has left its window.
local touched, more = 0, false
local views = {}
for at = FIRST_LIMIT, #ARGV, LIMIT_SIZE do
  local name, span = ARGV[at], ARGV[at + 3]
  local stored = known[closed_last + 1 + (at - FIRST_LIMIT) / LIMIT_SIZE]
  local cutoff_ms -- entries at or before this are out of the window
  local window_ms = tonumber(span)
  if window_ms then
    cutoff_ms = now_ms - window_ms
  else
    local previous, next_edge, next_but_one = string.match(span, '^(%d+) (%d+) (%d+)$')
    previous, next_edge, next_but_one = tonumber(previous), tonumber(next_edge), tonumber(next_but_one)
    if now_ms < previous or now_ms >= next_but_one then return { 'CLOCK', '', int(clock_ms), last, '', epoch, '' } end
    cutoff_ms = (now_ms >= next_edge and next_edge or previous) - 1
  end
  if cutoff_ms < 0 then cutoff_ms = 0 end

  local total, tail, tail_ms, head, head_ms, gone_ms
  if stored then
    total, tail, tail_ms, head, head_ms, gone_ms =
      string.match(stored, '^(%d+) ((%d+)%-%d+) ((%d+)%-%d+) (%d+)$')
    total, tail_ms, head_ms, gone_ms = tonumber(total), tonumber(tail_ms), tonumber(head_ms), tonumber(gone_ms)
  end
  -- Other names would be taken for other fields of the state.
  if not total and not string.find(name, '^[^|]*|[^|]*|[^|]*|.') then
    return wrong('the view ' .. name .. ' is not BUCKETS|METHODS|JOBS|WINDOW')
  end
  -- Where the log lacks a part of this window, or its corrections, the view knows more than the log: its sum stands until
  -- that part is out of the window, and is then taken afresh.
  local whole = cut_ms <= cutoff_ms
  -- Missing, or the clock went back behind what was dropped, or all that it counts has expired, or the log no longer
  -- has what it would have to drop: start afresh.
  local afresh = not total or head_ms <= cutoff_ms
  if not afresh and (gone_ms > cutoff_ms or (whole and tail_ms <= cut_ms)) then
    afresh = not known[1] or redis.call('EXISTS', log) == 1
    if not afresh then -- it was deleted or evicted, and nobody has charged since
      whole, cut_ms = false, math.max(cut_ms, last_ms)
      dirty[#dirty + 1] = 'cut_ms'
      dirty[#dirty + 1] = int(cut_ms)
    end
  end
  if afresh then
    total, tail_ms, gone_ms = 0, cutoff_ms + 1, cutoff_ms
    tail, head = int(tail_ms) .. '-0', int(cutoff_ms) .. '-' .. int(MAX_SEQ)
  end

  local counts
  while head ~= last and before(head, last) do
    local room = math.min(CHUNK, MOST_ENTRIES - touched)
    if room == 0 then more = true break end
    counts = counts or counter(name)
    local entries = redis.call('XRANGE', log, '(' .. head, last, 'COUNT', room)
    for _, entry in ipairs(entries) do
      total = total + counts(entry)
      head = entry[1]
    end
    touched = touched + #entries
    if #entries < room then head = last end
  end
  if tail_ms <= cutoff_ms and not whole then
    tail_ms, tail = cutoff_ms + 1, int(cutoff_ms + 1) .. '-0'
  end
  while not more and tail_ms <= cutoff_ms do
    local room = math.min(CHUNK, MOST_ENTRIES - touched)
    if room == 0 then more = true break end
    counts = counts or counter(name)
    local entries = redis.call('XRANGE', log, tail, int(cutoff_ms), 'COUNT', room)
    for _, entry in ipairs(entries) do
      total = total - counts(entry)
      local ms, seq = split(entry[1])
      gone_ms, tail_ms, tail = ms, ms, int(ms) .. '-' .. int(seq + 1)
    end
    touched = touched + #entries
    if #entries < room then
      -- The next one to drop, so that nothing is read again before its time.
      local live = redis.call('XRANGE', log, int(cutoff_ms + 1), '+', 'COUNT', 1)[1]
      tail = live and live[1] or int(cutoff_ms + 1) .. '-0'
      break
    end
  end
  views[#views + 1] = {
    name = name, total = total, tail = tail, head = head, gone_ms = gone_ms, stored = stored,
    cap = tonumber(ARGV[at + 1]), cost = tonumber(ARGV[at + 2]), carried = 0,
  }
  if more then break end
end

local another_second = math.floor(last_ms / 1000) ~= math.floor(clock_ms / 1000)
local live_ms = kept_ms
local due = another_second or keep_ms > kept_ms or not known[1]

local function put(view, total, head)
  local text = int(total) .. ' ' .. view.tail .. ' ' .. head .. ' ' .. int(view.gone_ms)
  if text ~= view.stored then
    view.stored = text
    dirty[#dirty + 1] = view.name
    dirty[#dirty + 1] = text
  end
end
local function flush()
  if due then
    kept_ms = math.max(kept_ms, keep_ms)
    redis.call('HSET', state, 'keep_ms', int(kept_ms))
    live_ms = math.max(kept_ms, carried_ms + KEEP_SLACK_MS - now_ms)
    -- No key is made that would live for ever.
    local lives = redis.pcall('PEXPIRE', state, int(live_ms))
    if type(lives) == 'table' and not known[1] then redis.pcall('HDEL', state, 'keep_ms') end
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, int(live_ms)) end
  end
  redis.call('HSET', state, unpack(dirty))
end

if more then
  -- Two limits may share a view, and the first of them has come further: it is written last.
  for index = #views, 1, -1 do put(views[index], views[index].total, views[index].head) end
  flush()
  return { 'MORE', '', int(now_ms), last, '', epoch, '' }
end

local reply = { 'ADMITTED', '', int(now_ms), last, '', epoch, '' }

-- What was lost counts until all of it would have expired.
if carried_ms > now_ms then
  local lines = {}
  for index, view in ipairs(views) do
    local carried = redis.call('HGET', state, 'carry:' .. view.name) or ''
    lines[index] = carried
    for parts in string.gmatch(carried, '%S+ (%S+) %S+ %S+') do
      for carried_units, until_ms in string.gmatch(parts, '(%d+):(%d+)') do
        if tonumber(until_ms) > now_ms then view.carried = view.carried + tonumber(carried_units) end
      end
    end
  end
  reply[7] = table.concat(lines, '\n')
end

-- The token of a repeat stays behind for a first try that is still under way.
if commit and retry_age_ms < 0 and repeated then
  reply[1] = 'REPEAT'
  return reply
end
if commit and retry_age_ms >= 0 then
  dirty[#dirty + 1] = fields[2]
  dirty[#dirty + 1] = int(clock_ms)
end

-- Compare.
for index = closed_first, closed_last do
  local closed = known[index]
  if closed and not charged_before then
    local until_ms = tonumber(string.match(closed, '^%d+'))
    if until_ms + jitter_ms > now_ms and (reply[5] == '' or until_ms > tonumber(string.match(reply[5], '^%d+'))) then
      reply[1], reply[5] = 'EXHAUSTED', closed
    end
  end
end
for _, view in ipairs(views) do
  local fits = view.cost == 0 or view.total + view.carried + view.cost <= view.cap
  if not fits and reply[1] == 'ADMITTED' and not charged_before then reply[1] = 'REFUSED' end
end

-- Write: the state, and then the entry.
if charged_before then reply[2] = charged_before end
local id = commit and reply[1] == 'ADMITTED' and not charged_before
if id then
  id = clock_ms > last_ms and int(clock_ms) .. '-0' or int(last_ms) .. '-' .. int(last_seq + 1)
  dirty[#dirty + 1] = 'last'
  dirty[#dirty + 1] = id
  reply[2], reply[4] = id, id
end
for index, view in ipairs(views) do
  local added = id and view.cost or 0
  put(view, view.total + added, id or view.head)
  reply[FIRST_USED - 1 + index] = int(view.total + view.carried + added)
end
if #dirty == 0 then return reply end
flush()

local log_is_new = false
if id then
  local refused
  local there = redis.pcall('XADD', log, 'NOMKSTREAM', id, 'u', u, 'm', method, 'j', job, 'g', region, 't', token)
  if not there then
    live_ms = math.max(live_ms, carried_ms + KEEP_SLACK_MS - now_ms)
    refused = redis.pcall('PEXPIRE', state, int(live_ms)) -- as it will be for the log
  elseif type(there) == 'table' then
    refused = there
  end
  if type(refused) == 'table' then
    dirty = { 'last', last }
    for _, view in ipairs(views) do put(view, view.total, view.head) end
    redis.call('HSET', state, unpack(dirty))
    return refused
  end
  if not there then
    log_is_new = true
    redis.call('XADD', log, id, 'u', u, 'm', method, 'j', job, 'g', region, 't', token)
    redis.call('PEXPIRE', log, int(live_ms))
    if known[1] then -- it was deleted or evicted: what the views counted of it still counts
      cut_ms = last_ms
      redis.call('HSET', state, 'cut_ms', int(cut_ms))
    end
  end
  if epoch == '' then
    redis.call('HSET', state, 'epoch', token)
    reply[6] = token
  end
end

-- Housekeeping, once a second at most and with each repeat: a bounded piece of trimming and of sweeping. Where it cannot
-- be done it is left undone: the charge stands.
if not (due or log_is_new or retry_age_ms >= 0) then return reply end
if log_is_new and type(redis.pcall('DEL', amended)) ~= 'table' then redis.call('HSET', state, 'corrected', '0') end
pcall(function()
  if math.abs(clock_ms - number(redis.call('HGET', state, 'looked_ms'))) < LOOK_EVERY_MS then return end
  redis.call('HSET', state, 'looked_ms', int(clock_ms))
  local info = redis.pcall('INFO', 'memory')
  local policy = type(info) == 'string' and string.match(info, 'maxmemory_policy:(%S+)') or '?'
  if policy ~= 'noeviction' then reply[#reply + 1] = policy end
end)
-- The log is kept for the longest window ever asked about, whoever asked.
local gone_ms = now_ms - kept_ms
pcall(function()
  local old = redis.call('XRANGE', log, '-', '(' .. int(math.max(0, gone_ms)), 'COUNT', CHUNK)
  if #old == 0 then return end
  local ms, seq = split(old[#old][1])
  redis.call('XTRIM', log, 'MINID', int(ms) .. '-' .. int(seq + 1))
  redis.call('HSET', state, 'cut_ms', int(math.max(cut_ms, ms)))
  for _, entry in ipairs(old) do redis.call('HDEL', amended, entry[1]) end
  if corrected and redis.call('EXISTS', amended) == 0 then redis.call('HSET', state, 'corrected', '0') end
end)
-- Of the state: repeats whose first tries have long failed, what was carried and has expired, and views that nobody has
-- asked about for so long, of limits that are configured no more.
pcall(function()
  local from = redis.call('HGET', state, 'swept') or '0'
  local piece = redis.call('HSCAN', state, string.match(from, '^%d+$') or '0', 'COUNT', CHUNK)
  for at = 1, #piece[2], 2 do
    local field, value, old = piece[2][at], piece[2][at + 1], false
    if string.find(field, '^repeat:') then
      old = math.abs(clock_ms - (tonumber(value) or 0)) >= REPEAT_KEPT_MS
    elseif string.find(field, '^carry:') or field == 'carried_ms' then
      old = carried_ms + KEEP_SLACK_MS <= now_ms
    else
      local head_ms = tonumber(string.match(value, '^%d+ %d+%-%d+ (%d+)%-%d+ %d+$'))
      old = head_ms and head_ms <= gone_ms
    end
    if old then redis.call('HDEL', state, field) end
  end
  if piece[1] ~= from then redis.call('HSET', state, 'swept', piece[1]) end
end)
return reply
