-- charge.lua: decide whether a call, or several together, may leave, and charge it.
--
-- Guarantee: one atomic step over all limits that the call names. An admitted charge is in the log when this returns; a refusal
-- and a peek change nothing but how far the views have read. The views read at most 250 log entries: where there are more, the
-- script saves its progress and answers MORE (call again with the same arguments). Arguments that cannot be right are an
-- error, and nothing is written.
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
--       3 commit           1 = charge, 0 = peek; 1t and 0t: the same, and the reply may be one line of text (below)
--       4 u                what to charge: a bare integer in bucket `units`, else BUCKET=N
--       5 method   6 job   7 region
--       8 idempotency_key  unique to this attempt, without spaces, @ or /. With 2 to 100 lines, for as many charges, all of which
--                          are made or none, one behind the other in the log: 4 to 7 have as many lines, one for each
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
-- Reply { outcome, id, now_ms, last, exhaustion, epoch, unlogged, used... }
--       outcome     ADMITTED, REFUSED (in `exhaustion` is a word for each limit: the ms of the charge that must leave its
--                   window before the call fits, or, where unlogged usage expires then, of a charge that would leave with it;
--                   - where it did not refuse, its window does not slide, or the log must be read for it: it lacks a part of
--                   the window, or more than 250 entries leave before there is room), EXHAUSTED (its record is in `exhaustion`),
--                   CLOCK (the clocks disagree; nothing was compared), MORE (call again), RETRIED (a late first try: its
--                   retry was answered already), BEHIND (this ledger lacks what the caller expects; nothing was compared:
--                   whoever knows what is missing reports it, `quota status` for example; then call again),
--                   GRANTED (upstream grants other numbers than the caller knows: those in `exhaustion`; nothing was
--                   compared: lower the caps, then call again)
--       id          of the charge; empty when nothing was charged. Of several charges, all ids in their order, spaces between
--       now_ms      the moment at which the windows end; with CLOCK the server's clock
--       last        the id of the newest entry, 0-0 in an empty log
--       epoch       of this ledger; empty before its first charge
--       unlogged    a line for each limit, "EPOCH EXPIRIES KEPT LAST EPOCH ..." (quota/ledger/unlogged.py); empty if there is
--                   none
--       used...     for each limit, in their order, with this charge if it was admitted, and with unlogged usage
--       Behind them, once a day: the server's maxmemory-policy if that lets it drop our keys, "?" if it may not be seen
--       To 1t and 0t an ADMITTED or REFUSED may also be one line, "OUTCOME NOW_MS LAST EPOCH USED USED...", behind which a
--       REFUSED has the words of `exhaustion`: of a charge, LAST is its id; unlogged is empty

local log, state, corrections = KEYS[1], KEYS[2], KEYS[3]
local commit, in_one_line = ARGV[3] == '1' or ARGV[3] == '1t', ARGV[3] == '1t' or ARGV[3] == '0t'
local u, method, job, region, idempotency_key = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]

local FIRST_LIMIT, LIMIT_SIZE = 14, 4
local FIRST_USED = 8
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

-- @include parts/clocks_agree.lua
-- @include parts/bucket_and_units.lua
-- @include parts/what_a_view_counts.lua
-- @include parts/rights.lua
-- An error where this user lacks any right, or the server memory. The latter is asked first: what follows other writes gets it.
local function refused_first()
  local tried = redis.pcall('HSET', KEYS[2] .. ':none', 'f', 'v', 'without a value')
  if string.find(tried.err, 'OOM', 1, true) then return tried end
  local missing = missing_rights()
  return #missing > 0 and redis.error_reply('NOPERM this user may not run ' .. table.concat(missing, ', ')) or nil
end

-- What the fast path has answered, where housekeeping is to follow.
local answered

-- >>> fast path
-- The usual decision in the fewest steps: every view stands at the log's end, and little leaves it. Nothing is written before
-- that is sure. All else is left to what follows, which would have answered and written the same.
repeat
  local call, match, ARGV = redis.call, string.match, ARGV
  local count, clock, closed_by, expected = #ARGV, ARGV[1], ARGV[12], ARGV[13]
  if count < FIRST_LIMIT - 1 or count > FIRST_LIMIT + 40 * LIMIT_SIZE or (count - FIRST_LIMIT + 1) % LIMIT_SIZE ~= 0
    or not KEYS[3] or KEYS[4] or ARGV[9] ~= '-1' or (not commit and ARGV[3] ~= '0' and not in_one_line)
    or (commit and not string.find(idempotency_key, '^[^%s@/]+$'))
  then break end
  local caller_ms, retention_ms = tonumber(ARGV[2]), tonumber(ARGV[10])
  local jitter_ms = ARGV[11] == '0' and 0 or tonumber(ARGV[11])
  local units = tonumber(match(u, '^%d+$') or match(u, '=(%d+)$'))
  if not (units and units <= MAX_UNITS and retention_ms and retention_ms >= 1 and retention_ms <= LATEST_MS and jitter_ms
    and jitter_ms >= 0 and jitter_ms <= MAX_SEQ)
  then break end

  -- Making a number into text takes as long as a small call: what is text already stays text.
  if clock == '0' then
    local time = call('TIME')
    local micros = time[2]
    local digits = #micros
    clock = time[1] .. (digits == 6 and string.sub(micros, 1, 3) or digits == 5 and '0' .. string.sub(micros, 1, 2)
      or digits == 4 and '00' .. string.sub(micros, 1, 1) or '000')
  elseif #clock > 14 or not match(clock, '^[1-9]%d*$') then
    break
  end
  local clock_ms = tonumber(clock)
  local now, now_ms = clock, clock_ms
  if caller_ms ~= 0 then
    if not (caller_ms and caller_ms >= 0 and caller_ms <= clock_ms + CLOCK_SLACK_MS
      and caller_ms >= clock_ms - CLOCK_BEHIND_MS)
    then break end
    if caller_ms + CLOCK_SLACK_MS < now_ms then
      now_ms = caller_ms + CLOCK_SLACK_MS
      now = string.format('%.0f', now_ms)
    end
  end

  local fields = {
    'HMGET', state, 'last', 'epoch', 'format', 'granted', 'unlogged_until_ms', 'has_corrections', 'trimmed_through_ms',
    'retention_ms', 'maintained_ms', 'retried:' .. idempotency_key, false, false, false, false,
  }
  local field = 13
  if string.find(closed_by, ',', 1, true) then
    if #closed_by > MAX_LIMITS then break end
    for name in string.gmatch(closed_by, '[^,]+') do
      fields[field] = 'closed:' .. name
      field = field + 1
    end
  elseif closed_by ~= '' then
    fields[field] = 'closed:' .. closed_by
    field = field + 1
  end
  local first_view = field
  for at = FIRST_LIMIT, count, LIMIT_SIZE do
    fields[field] = 'view:' .. ARGV[at]
    field = field + 1
  end
  local known = call(unpack(fields, 1, field - 1))
  local last, epoch, granted = known[1], known[2], known[4] or ''
  local trimmed_through_ms = tonumber(known[7] or 0)
  if not last or not epoch or string.byte(epoch) == 33 or known[3] ~= '5' or known[10]
    or (tonumber(known[5] or 0) or MAX_SEQ) > now_ms or not (trimmed_through_ms and trimmed_through_ms >= 0)
    or (known[6] == '1' and call('EXISTS', corrections) == 0)
  then break end
  local last_time, last_seq = match(last, '^(%d+)%-(%d+)$')
  local last_ms = tonumber(last_time)

  local sure = true
  if expected ~= '' and expected ~= epoch .. ' ' .. last .. ' @' .. granted and expected ~= ' @' .. granted then
    local seen, grants = match(expected, '^(.*) (@%S*)$')
    local its_epoch, ids = match(seen or expected, '^(%S+)(.*)$')
    if its_epoch ~= epoch or (grants and grants ~= '@' .. granted) then break end
    for id in string.gmatch(ids, '%S+') do
      if id ~= last then
        local ms = tonumber(match(id, '^(%d+)%-%d+$'))
        sure = sure and (not ms or ms <= trimmed_through_ms or #call('XRANGE', log, id, id) == 1)
      end
    end
  end
  for at = 11, first_view - 3 do
    sure = sure and (not known[at] or (tonumber(match(known[at], '^%d+')) or MAX_SEQ) + jitter_ms <= now_ms)
  end
  if not sure then break end

  -- Of each view: its total, tail, dropped_through_ms, and the cost.
  local views = { false, false, false, false, false, false, false, false, false, false, false, false }
  local fits, changed, leaving_from, leaving = true, false, nil, nil
  for at = FIRST_LIMIT, count, LIMIT_SIZE do
    local cap, cost, span = tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
    local total, tail, tail_ms, head, dropped_through =
      match(known[first_view - 2 + (at - FIRST_LIMIT) / LIMIT_SIZE] or '', '^(%d+) ((%d+)%-%d+) (%S+) (%d+)$')
    cost = cost == u and units or tonumber(cost)
    local cutoff_ms = tonumber(span)
    if cutoff_ms then
      cutoff_ms = cutoff_ms >= 1 and cutoff_ms <= retention_ms and now_ms - cutoff_ms or -1
    else
      local previous, next_edge, next_but_one = match(span, '^(%d+) (%d+) (%d+)$')
      previous, next_edge, next_but_one = tonumber(previous), tonumber(next_edge), tonumber(next_but_one)
      cutoff_ms = next_but_one and now_ms >= previous and now_ms < next_but_one
        and (now_ms >= next_edge and next_edge or previous) - 1 or -1
    end
    total, tail_ms = tonumber(total), tonumber(tail_ms)
    sure = head == last and cutoff_ms >= 0 and cutoff_ms % 1 == 0 and cutoff_ms < last_ms and trimmed_through_ms <= cutoff_ms
      and tail_ms > trimmed_through_ms and tonumber(dropped_through) <= cutoff_ms
      and cap and cap >= -MAX_SEQ and cap <= MAX_SEQ and cost and cost >= 0 and cost <= MAX_SEQ
      and (not commit or cost == units or (cost == 1 and string.find(ARGV[at], '|calls$') ~= nil))
    if not sure then break end
    if tail_ms <= cutoff_ms then
      changed = true
      if leaving_from ~= tail then
        leaving_from, leaving = tail, call('XRANGE', log, tail, '+', 'COUNT', 2)
      end
      -- Most views count all units of the usual bucket: then there is no name to be taken apart.
      local counts, n, leaves = not string.find(ARGV[at], '^units|%*|%*|%d+$') and counter(ARGV[at]), 0, true
      sure = counts ~= nil
      while sure and leaves do
        n = n + 1
        if n == 3 and #leaving == 2 then leaving = call('XRANGE', log, tail, '+', 'COUNT', 10) end
        local entry = leaving[n]
        sure = entry ~= nil
        if sure then
          local ms = match(entry[1], '^%d+')
          leaves = tonumber(ms) <= cutoff_ms
          if leaves then
            local f = entry[2]
            local bucket, charged = bucket_and_units(f[2])
            local counted = math.max(0, tonumber(known[6] == '1' and call('HGET', corrections, entry[1]) or charged))
            if counts then counted = counts(bucket, f[4], f[6], counted) end
            if counts or bucket == 'units' then total = total - counted end
            dropped_through = ms
          else
            tail = entry[1]
          end
        end
      end
    end
    if not sure or total < 0 or total > 1000000000 then sure = false break end
    fits = fits and (cost == 0 or total + cost <= cap)
    local place = at - FIRST_LIMIT
    views[place + 1], views[place + 2], views[place + 3], views[place + 4] = total, tail, dropped_through, cost
  end
  if not sure then break end

  if not fits then break end -- when there is room is said below

  -- Changes nothing, and fails where a charge would, as on a replica: a peek promises no more than that.
  if not commit then call('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v') end
  local admitted = commit
  local newest = last
  if admitted then
    newest = clock_ms > last_ms and clock .. '-0' or last_time .. '-' .. string.format('%.0f', tonumber(last_seq) + 1)
  end
  local due, kept_ms = false, ARGV[10] == known[8] and retention_ms or tonumber(known[8])
  if admitted or changed then
    local minute_ms, maintained_ms = clock_ms - clock_ms % MAINTENANCE_EVERY_MS, tonumber(known[9]) or 0
    due = not (kept_ms and maintained_ms >= minute_ms and maintained_ms < minute_ms + MAINTENANCE_EVERY_MS
      and retention_ms <= kept_ms)
    if due then
      if not (kept_ms and kept_ms >= 0 and kept_ms <= LATEST_MS) then break end
      local refused = refused_first()
      if refused then return refused end
      if kept_ms < retention_ms then
        kept_ms = retention_ms
        call('HSET', state, 'retention_ms', string.format('%.0f', kept_ms))
      end
      for _, key in ipairs(KEYS) do call('PEXPIRE', key, string.format('%.0f', math.max(kept_ms, HISTORY_MS))) end
    end
  end
  local dirty, used = { 'HSET', state, 'last', newest, false, false, false, false, false, false, false, false }, ''
  field = 5
  for at = FIRST_LIMIT, count, LIMIT_SIZE do
    local place = at - FIRST_LIMIT
    local total = string.format('%d', admitted and views[place + 1] + views[place + 4] or views[place + 1])
    used = used .. ' ' .. total
    dirty[field] = 'view:' .. ARGV[at]
    dirty[field + 1] = total .. ' ' .. views[place + 2] .. ' ' .. newest .. ' ' .. views[place + 3]
    field = field + 2
  end
  if admitted or changed then call(unpack(dirty, 1, field - 1)) end
  if admitted then
    local there = redis.pcall('XADD', log, 'NOMKSTREAM', newest, 'u', u, 'm', method, 'j', job, 'g', region, 'k',
      idempotency_key)
    if type(there) ~= 'string' then -- it cannot be written, or the log is gone
      dirty[4] = last
      for at = FIRST_LIMIT, count, LIMIT_SIZE do
        dirty[6 + (at - FIRST_LIMIT) / 2] = known[first_view - 2 + (at - FIRST_LIMIT) / LIMIT_SIZE]
      end
      call(unpack(dirty, 1, field - 1))
      break
    end
  end
  local outcome = 'ADMITTED'
  local line = in_one_line and not string.find(epoch, ' ', 1, true)
    and outcome .. ' ' .. now .. ' ' .. newest .. ' ' .. epoch .. used
  if line and not due then return line end
  local reply = { outcome, admitted and newest or '', now, newest, '', epoch, '' }
  for total in string.gmatch(used, '%d+') do reply[#reply + 1] = total end
  if not due then return reply end
  local house = { clock_ms, now_ms, last_ms, kept_ms, trimmed_through_ms, tonumber(known[5] or 0), known[6] == '1' }
  answered = { line = line, reply = reply, house = house }
until true
-- <<< fast path

-- @include parts/int.lua
-- @include parts/ids.lua

-- A number of the state: 0 where there is none, or one that cannot be right.
local function number(field)
  local n = field and tonumber(field) or 0
  return n >= 0 and n <= LATEST_MS and n or 0
end

-- L23. Housekeeping, a bounded piece at a time. If it fails, the charge stands. `last_ms` is of before this charge. Returns the
-- server's maxmemory-policy, where that is to be told.
local function keep_house(clock_ms, now_ms, last_ms, retention_ms, trimmed_through_ms, unlogged_until_ms, has_corrections)
  local told
  redis.pcall('HSET', state, 'maintained_ms', int(clock_ms))
  pcall(function()
    if math.abs(clock_ms - number(redis.call('HGET', state, 'eviction_checked_ms'))) < CHECK_EVICTION_EVERY_MS then return end
    redis.call('HSET', state, 'eviction_checked_ms', int(clock_ms))
    local info = redis.pcall('INFO', 'memory')
    local policy = type(info) == 'string' and string.match(info, 'maxmemory_policy:(%S+)') or '?'
    if policy ~= 'noeviction' then told = policy end
  end)
  -- L13. The log is kept for the longest window that anybody ever named, and until the history has it (L29). What the newest
  -- charge before this one still needed stays until the next: a clock that stood ahead for one charge costs no history.
  local sure_ms = math.min(now_ms, last_ms)
  pcall(function()
    local through, rolled = int(math.max(0, sure_ms - retention_ms)) .. '-0', redis.call('HGET', state, 'rolled_up')
    if rolled then
      local forgotten = int(math.max(0, sure_ms - HISTORY_MS)) .. '-0'
      if before(rolled, forgotten) then rolled = forgotten end
      if before(rolled, through) then through = rolled end
    end
    local old = redis.call('XRANGE', log, '-', '(' .. through, 'COUNT', CHUNK)
    if #old == 0 then return end
    local ms, seq = split(old[#old][1])
    redis.call('XTRIM', log, 'MINID', int(ms) .. '-' .. int(seq + 1))
    redis.call('HSET', state, 'trimmed_through_ms', int(math.max(trimmed_through_ms, ms)))
    if #old == CHUNK then redis.call('HSET', state, 'maintained_ms', '0') end
    if not has_corrections then return end
    for _, entry in ipairs(old) do redis.call('HDEL', corrections, entry[1]) end
    if redis.call('EXISTS', corrections) == 0 then redis.call('HSET', state, 'has_corrections', '0') end
  end)
  -- From the state go: keys of retries whose first tries have long failed, unlogged usage that has expired, claims that have
  -- lapsed, the last numbers of machines that have repaid nothing for as long as the log is kept, and views that nobody has
  -- used for as long: their limits are configured no more.
  pcall(function()
    local from = redis.call('HGET', state, 'housekeeping_cursor') or '0'
    local piece = redis.call('HSCAN', state, string.match(from, '^%d+$') or '0', 'COUNT', CHUNK)
    for at = 1, #piece[2], 2 do
      local field, value, old = piece[2][at], piece[2][at + 1], false
      local kind = string.match(field, '^[%a_]+:?')
      if kind == 'view:' then
        local head_ms = tonumber(string.match(value, '^%d+ %d+%-%d+ (%d+)%-%d+ %d+$'))
        old = head_ms and head_ms <= now_ms - retention_ms
      elseif kind == 'retried:' then
        old = math.abs(clock_ms - (tonumber(value) or 0)) >= RETRIED_KEPT_MS
      elseif kind == 'unlogged:' or field == 'unlogged_until_ms' then
        old = unlogged_until_ms + RETENTION_SLACK_MS <= sure_ms
      elseif kind == 'repaid_at:' then
        old = (tonumber(value) or 0) <= clock_ms - retention_ms
        if old then redis.call('HDEL', state, (string.gsub(field, '^repaid_at:', 'repaid:'))) end
      elseif kind == 'claim:' then
        old = (tonumber(string.match(value, '^(%d+) ')) or 0) <= clock_ms
      end
      if old then redis.call('HDEL', state, field) end
    end
    if piece[1] ~= from then redis.call('HSET', state, 'housekeeping_cursor', piece[1]) end
  end)
  return told
end

if answered then
  local policy = keep_house(unpack(answered.house))
  answered.reply[#answered.reply + 1] = policy
  return not policy and answered.line or answered.reply
end

local caller_ms = tonumber(ARGV[2])
local retry_age_ms = tonumber(ARGV[9])
local retention_ms, jitter_ms, closed_by = tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12]
local expected, known_grants = string.match(ARGV[13] or '', '^(.*) (@%S*)$')
if not known_grants then expected, known_grants = ARGV[13], '' end

-- A number that is none would be compared with, or written to the log, and count wrongly for everybody.
local function wrong(what) return redis.error_reply('ERR charge.lua: ' .. what) end
local clock_ms, units = tonumber(ARGV[1]), 0 -- of all charges
local us, methods, jobs, regions, idempotency_keys = { u }, { method }, { job }, { region }, { idempotency_key }
if string.find(idempotency_key or '', '\n', 1, true) then
  local function lines(text)
    local found = {}
    for line in string.gmatch(text .. '\n', '([^\n]*)\n') do found[#found + 1] = line end
    return found
  end
  us, methods, jobs, regions, idempotency_keys = lines(u), lines(method), lines(job), lines(region), lines(idempotency_key)
end
local several = #idempotency_keys > 1
for _, one in ipairs(us) do
  local number = tonumber(string.match(one, '^%d+$') or string.match(one, '=(%d+)$'))
  units = units and number and number <= MAX_UNITS and units + number
end
if #KEYS ~= 3 or #ARGV < FIRST_LIMIT - 1 or (#ARGV - FIRST_LIMIT + 1) % LIMIT_SIZE ~= 0 then
  return wrong('3 keys and 13 arguments are needed, then 4 for each limit')
elseif (#ARGV - FIRST_LIMIT + 1) / LIMIT_SIZE > MAX_LIMITS then
  return wrong('more than ' .. MAX_LIMITS .. ' limits')
elseif not (clock_ms and caller_ms and retry_age_ms and jitter_ms and retention_ms) or not (
  clock_ms >= 0 and clock_ms <= LATEST_MS and caller_ms >= 0 and caller_ms <= MAX_SEQ and retry_age_ms >= -1
  and retry_age_ms <= MAX_SEQ and retention_ms >= 1 and retention_ms <= LATEST_MS and jitter_ms >= 0 and jitter_ms <= MAX_SEQ
) then -- nan is neither
  return wrong('now_ms, caller_ms, retry_age_ms, retention_ms (1 or more) and jitter_ms are numbers')
elseif not commit and ARGV[3] ~= '0' and ARGV[3] ~= '0t' then
  return wrong('commit is 1 or 0')
elseif several and (#idempotency_keys > MAX_CHARGES or #us ~= #idempotency_keys or #methods ~= #us or #jobs ~= #us
  or #regions ~= #us)
then
  return wrong('several charges are at most ' .. MAX_CHARGES .. ', each with a line in u, method, job, region and key')
elseif not units then
  return wrong('u is N or BUCKET=N, with N from 0 to ' .. int(MAX_UNITS))
end
for _, key in ipairs(idempotency_keys) do
  if commit and not string.find(key, '^[^%s@/]+$') then
    return wrong('a charge needs an idempotency key without spaces, @ or /')
  end
end
-- As on the fast path: a peek fails where a charge would.
if not commit then redis.call('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v') end

-- @include parts/clock.lua
clock_ms = clock(clock_ms)
-- L11. Charges expire by whichever clock is behind, so that no single clock running ahead frees budget.
local now_ms = clock_ms
if caller_ms > 0 and caller_ms + CLOCK_SLACK_MS < now_ms then now_ms = caller_ms + CLOCK_SLACK_MS end
if not clocks_agree(clock_ms, caller_ms) then return { 'CLOCK', '', int(clock_ms), '0-0', '', '', '' } end

-- @include parts/format.lua

-- What a view counts of several charges; nil if that is no view's name.
local kinds, kind_of = {}, {}
for index, one in ipairs(several and us or {}) do
  local kind = one .. '\n' .. methods[index] .. '\n' .. jobs[index]
  if not kind_of[kind] then
    local bucket, its_units = bucket_and_units(one)
    kind_of[kind] = { calls = 0, bucket = bucket, method = methods[index], job = jobs[index], units = tonumber(its_units) }
    kinds[#kinds + 1] = kind_of[kind]
  end
  kind_of[kind].calls = kind_of[kind].calls + 1
end
local function counted_together(view)
  local counts, sum = counter(view), 0
  for _, kind in ipairs(counts and kinds or {}) do
    sum = sum + kind.calls * counts(kind.bucket, kind.method, kind.job, kind.units)
  end
  return counts and sum
end

-- One read fetches everything the decision needs.
local fields = {
  'last', 'retried:' .. idempotency_keys[1], 'retention_ms', 'trimmed_through_ms', 'epoch', 'unlogged_until_ms',
  'has_corrections', 'format', 'granted', 'maintained_ms',
}
local closed_first = #fields + 1
for name in string.gmatch(closed_by, '[^,]+') do fields[#fields + 1] = 'closed:' .. name end
local closed_last = #fields
if closed_last - closed_first >= MAX_LIMITS then return wrong('more than ' .. MAX_LIMITS .. ' names in closed_by') end
for at = FIRST_LIMIT, #ARGV, LIMIT_SIZE do
  local name, cap, cost, span = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  local window_ms = tonumber(span)
  if not (cap and cap >= -MAX_SEQ and cap <= MAX_SEQ and cost and cost >= 0 and cost <= MAX_SEQ) then
    return wrong('cap and cost of ' .. name .. ' are numbers')
  elseif commit and several and cost ~= counted_together(name) then
    return wrong('the cost of ' .. name .. ' is the sum of what it counts of the charges')
  elseif commit and not several and cost ~= units and not (cost == 1 and string.find(name, '|calls$')) then
    return wrong('the cost of ' .. name .. ' is the units charged, or 1 where it counts calls')
  elseif window_ms and not (window_ms >= 1 and window_ms <= retention_ms) then
    return wrong('span of ' .. name .. ' is 1 to retention_ms')
  elseif not window_ms and not string.find(span, '^%d+ %d+ %d+$') then
    return wrong('span of ' .. name .. ' is a window in ms, or three edges')
  end
  fields[#fields + 1] = 'view:' .. name
end
local known = redis.call('HMGET', state, unpack(fields))
local unknown_format = other_format(known[8], known[5])
if unknown_format then return unknown_format end
local last, retried = known[1], known[2]
local stored_retention_ms, trimmed_through_ms = number(known[3]), number(known[4])
local epoch, unlogged_until_ms, has_corrections = known[5] or '', number(known[6]), known[7] == '1'
local dirty = {} -- what is to be set in the state: field, value, field, value
if not last then -- L14: before the first charge, or the state was evicted: it is made again from the other two
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  last = newest[1] and newest[1][1] or '0-0'
  stored_retention_ms = math.max(stored_retention_ms, redis.call('PTTL', log))
  has_corrections = redis.call('EXISTS', corrections) == 1
  if has_corrections then dirty = { 'has_corrections', '1' } end
end
local last_ms, last_seq = split(last)
-- L14. Without its corrections the log says too much: it no longer tells how much leaves a window.
if has_corrections and redis.call('EXISTS', corrections) == 0 then
  has_corrections, trimmed_through_ms = false, math.max(trimmed_through_ms, last_ms)
  dirty = { 'has_corrections', '0', 'trimmed_through_ms', int(trimmed_through_ms) }
end

-- L16. A retry of a call whose answer was lost: if the first try did arrive, its charge is the answer. Several charges are
-- there together; of those that were trimmed since, the ids follow from the others'.
local charged_before
if commit and retry_age_ms >= 0 then
  local asked_ms = math.min(clock_ms - retry_age_ms, caller_ms > 0 and caller_ms or clock_ms) -- a retry may come late, too
  local its_epoch, its_ids = string.match(expected, '^(%S+)(.*)$')
  local seen -- before the first try
  for id in string.gmatch(its_epoch == epoch and its_ids or '', '%d+%-%d+') do
    if not seen or before(seen, id) then seen = id end
  end
  local since, to = seen and '(' .. seen or int(math.max(0, asked_ms - CLOCK_SLACK_MS)), '+'
  local place, ids, looked = {}, {}, 0
  for index, key in ipairs(idempotency_keys) do place[key] = index end
  repeat
    local entries = redis.call('XREVRANGE', log, to, since, 'COUNT', CHUNK)
    for _, entry in ipairs(entries) do
      local index = place[entry[2][10]]
      if index then ids[index] = entry[1] end
    end
    looked = looked + #entries
    local oldest = entries[CHUNK]
    to = oldest and '(' .. oldest[1]
    local is_older = oldest and split(oldest[1]) < asked_ms - 100
  until next(ids) or not oldest or looked >= (is_older and MAX_BEFORE or MAX_LOOKED)
  local found, id = next(ids)
  if found then
    local ms, seq = split(id)
    for index = 1, #us do ids[index] = ids[index] or int(ms) .. '-' .. int(seq + index - found) end
    charged_before = table.concat(ids, ' ')
  end
end

-- L18. Behind: the epoch is not the expected one, or an entry is missing that was neither trimmed nor lost with the whole
-- log (then the views still know of it). A caller that saw the newest entry pays for one comparison only.
local function is_behind()
  local expected_epoch, ids = string.match(expected, '^(%S+)(.*)$')
  if expected_epoch ~= epoch then return true end
  for id in string.gmatch(ids, '%S+') do
    if id ~= last and (split(id) or 0) > trimmed_through_ms and #redis.call('XRANGE', log, id, id) == 0 then
      return not known[1] or redis.call('EXISTS', log) == 1
    end
  end
  return false
end
if expected ~= '' and expected ~= epoch .. ' ' .. last and not charged_before and is_behind() then
  return { 'BEHIND', '', int(now_ms), last, '', epoch, '' }
end
-- L28. The caps are the caller's: it must have made them from what upstream grants now.
local granted = known[9] or ''
if known_grants ~= '' and known_grants ~= '@' .. granted and not charged_before then
  return { 'GRANTED', '', int(now_ms), last, granted, epoch, '' }
end

-- What the view counts of an entry. Its name is taken apart only where there are entries to be read.
local function counter_of_entries(view)
  local count = counter(view)
  return function(entry)
    local f = entry[2]
    local bucket, charged = bucket_and_units(f[2])
    local counted = has_corrections and redis.call('HGET', corrections, entry[1]) or charged
    return count(bucket, f[4], f[6], math.max(0, tonumber(counted)))
  end
end

-- L4, first half: bring each view up to the log's end and drop what has left its window.
local touched, more = 0, false
local views = {}
for at = FIRST_LIMIT, #ARGV, LIMIT_SIZE do
  local name, span = ARGV[at], ARGV[at + 3]
  local stored = known[closed_last + 1 + (at - FIRST_LIMIT) / LIMIT_SIZE]
  local cutoff_ms -- L5: entries at or before this are out of the window
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

  local total, tail, tail_ms, head, head_ms, dropped_through_ms
  if stored then
    total, tail, tail_ms, head, head_ms, dropped_through_ms =
      string.match(stored, '^(%d+) ((%d+)%-%d+) ((%d+)%-%d+) (%d+)$')
    total, tail_ms, head_ms = tonumber(total), tonumber(tail_ms), tonumber(head_ms)
    dropped_through_ms = tonumber(dropped_through_ms)
  end
  if not total and not string.find(name, '^[^|]*|[^|]*|[^|]*|.') then
    return wrong('the view ' .. name .. ' is not BUCKETS|METHODS|JOBS|WINDOW')
  end
  -- L14. Where the log lacks a part of this window, or its corrections, the view knows more than the log: its total stands
  -- until that part is out of the window, and is then taken afresh.
  local whole = trimmed_through_ms <= cutoff_ms
  -- L6, L13. Missing, or the clock went back behind what was dropped, or all that it counts has expired, or the log no
  -- longer has what it would have to drop: start afresh.
  local afresh = not total or head_ms <= cutoff_ms
  if not afresh and (dropped_through_ms > cutoff_ms or (whole and tail_ms <= trimmed_through_ms)) then
    afresh = not known[1] or redis.call('EXISTS', log) == 1
    if not afresh then -- it was deleted or evicted, and nobody has charged since
      whole, trimmed_through_ms = false, math.max(trimmed_through_ms, last_ms)
      dirty[#dirty + 1] = 'trimmed_through_ms'
      dirty[#dirty + 1] = int(trimmed_through_ms)
    end
  end
  if afresh then
    total, tail_ms, dropped_through_ms = 0, cutoff_ms + 1, cutoff_ms
    tail, head = int(tail_ms) .. '-0', int(cutoff_ms) .. '-' .. int(MAX_SEQ)
  end

  local counts
  while head ~= last and before(head, last) do -- L7
    local room = math.min(CHUNK, MAX_ENTRIES - touched)
    if room == 0 then more = true break end
    counts = counts or counter_of_entries(name)
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
  while not more and tail_ms <= cutoff_ms do -- L8
    local room = math.min(CHUNK, MAX_ENTRIES - touched)
    if room == 0 then more = true break end
    counts = counts or counter_of_entries(name)
    local entries = redis.call('XRANGE', log, tail, int(cutoff_ms), 'COUNT', room)
    for _, entry in ipairs(entries) do
      total = total - counts(entry)
      local ms, seq = split(entry[1])
      dropped_through_ms, tail_ms, tail = ms, ms, int(ms) .. '-' .. int(seq + 1)
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
    name = name, total = total, tail = tail, head = head, dropped_through_ms = dropped_through_ms, stored = stored,
    cap = tonumber(ARGV[at + 1]), cost = tonumber(ARGV[at + 2]), unlogged = 0, expiries = {}, window_ms = window_ms, whole = whole,
  }
  if more then break end
end

local live_ms = math.max(stored_retention_ms, HISTORY_MS) -- L12
local another_minute = math.floor(number(known[10]) / MAINTENANCE_EVERY_MS) ~= math.floor(clock_ms / MAINTENANCE_EVERY_MS)
local due = another_minute or retention_ms > stored_retention_ms or not known[1]
local refused = due and refused_first()
if refused then return refused end

local function put(view, total, head)
  local text = int(total) .. ' ' .. view.tail .. ' ' .. head .. ' ' .. int(view.dropped_through_ms)
  if text ~= view.stored then
    view.stored = text
    dirty[#dirty + 1] = 'view:' .. view.name
    dirty[#dirty + 1] = text
  end
end
local function flush()
  if due then
    stored_retention_ms = math.max(stored_retention_ms, retention_ms)
    redis.call('HSET', state, 'format', FORMAT, 'retention_ms', int(stored_retention_ms))
    live_ms = math.max(stored_retention_ms, HISTORY_MS, unlogged_until_ms + RETENTION_SLACK_MS - now_ms)
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

-- L17. What was lost counts until all of it would have expired.
if unlogged_until_ms > now_ms then
  local lines = {}
  for index, view in ipairs(views) do
    local reports = redis.call('HGET', state, 'unlogged:' .. view.name) or ''
    lines[index] = reports
    for expiries in string.gmatch(reports, '%S+ (%S+) %S+ %S+') do
      for unlogged_units, until_ms in string.gmatch(expiries, '(%d+):(%d+)') do
        if tonumber(until_ms) > now_ms then
          view.unlogged = view.unlogged + tonumber(unlogged_units)
          view.expiries[#view.expiries + 1] = { ms = tonumber(until_ms), units = tonumber(unlogged_units) }
        end
      end
    end
  end
  reply[7] = table.concat(lines, '\n')
end

-- L16. The key of a retry stays behind for a first try that is still under way.
if commit and retry_age_ms < 0 and retried then
  reply[1] = 'RETRIED'
  return reply
end
if commit and retry_age_ms >= 0 then
  dirty[#dirty + 1] = fields[2]
  dirty[#dirty + 1] = int(clock_ms)
end

-- L9, L20: compare.
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
  view.fits = view.cost == 0 or view.total + view.unlogged + view.cost <= view.cap
  if not view.fits and reply[1] == 'ADMITTED' and not charged_before then reply[1] = 'REFUSED' end
end

-- L9. Of a sliding view that refuses: the ms of the charge that must leave its window before the call fits. Its charges leave in
-- the order of the log, and between them expires what was lost (L17), so it may also be that of one that would leave with such
-- an expiry. `-` where the log must be read for it: it lacks a part of the window, or more than this may read.
local function leaving(view)
  local room, expiries, expired, size = view.cap - view.cost, view.expiries, 0, 1
  local left, from, counts = view.total + view.unlogged, view.tail, counter_of_entries(view.name)
  table.sort(expiries, function(a, b) return a.ms < b.ms end)
  -- The same for an expiry by then that makes room; nil if there is none.
  local function expiring(until_ms)
    while expiries[expired + 1] and expiries[expired + 1].ms <= until_ms do
      expired = expired + 1
      left = left - expiries[expired].units
      if left <= room then return int(math.max(0, expiries[expired].ms - view.window_ms)) end
    end
  end
  while room >= 0 and touched < MAX_ENTRIES do
    size = math.min(size, MAX_ENTRIES - touched)
    local entries = redis.call('XRANGE', log, from, '+', 'COUNT', size)
    touched = touched + #entries
    for _, entry in ipairs(entries) do
      local ms = split(entry[1])
      local word = expiring(ms + view.window_ms)
      if word then return word end
      left, from = left - counts(entry), '(' .. entry[1]
      if left <= room then return int(ms) end
    end
    if #entries < size then return expiring(math.huge) or '-' end
    size = size * 2
  end
  return '-'
end
if reply[1] == 'REFUSED' then
  local words = {}
  for index, view in ipairs(views) do
    words[index] = not view.fits and view.window_ms and view.whole and leaving(view) or '-'
  end
  reply[5] = table.concat(words, ' ')
end

-- L22: write the state, and then the entry.
if charged_before then reply[2] = charged_before end
local ids, id = {}, commit and reply[1] == 'ADMITTED' and not charged_before -- the last of them
if id then
  -- L10
  local ms, seq = int(last_ms), last_seq + 1
  if clock_ms > last_ms then ms, seq = int(clock_ms), 0 end
  for index = 1, #us do ids[index] = ms .. '-' .. int(seq + index - 1) end
  id = ids[#ids]
  dirty[#dirty + 1] = 'last'
  dirty[#dirty + 1] = id
  reply[2], reply[4] = table.concat(ids, ' '), id
end
for index, view in ipairs(views) do
  local added = id and view.cost or 0
  put(view, view.total + added, id or view.head)
  reply[FIRST_USED - 1 + index] = int(view.total + view.unlogged + added)
end
if #dirty == 0 then return reply end
flush()

local log_is_new = false
if id then
  local refused
  local there = redis.pcall('XADD', log, 'NOMKSTREAM', ids[1], 'u', us[1], 'm', methods[1], 'j', jobs[1], 'g', regions[1], 'k',
    idempotency_keys[1])
  if not there then
    live_ms = math.max(live_ms, unlogged_until_ms + RETENTION_SLACK_MS - now_ms)
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
    redis.call('XADD', log, ids[1], 'u', us[1], 'm', methods[1], 'j', jobs[1], 'g', regions[1], 'k', idempotency_keys[1])
    redis.call('PEXPIRE', log, int(live_ms))
    if known[1] then -- L14: it was deleted or evicted: what the views counted of it still counts
      trimmed_through_ms = last_ms
      redis.call('HSET', state, 'trimmed_through_ms', int(trimmed_through_ms))
    end
  end
  for index = 2, #ids do -- where the first may be appended, all may
    redis.call('XADD', log, ids[index], 'u', us[index], 'm', methods[index], 'j', jobs[index], 'g', regions[index], 'k',
      idempotency_keys[index])
  end
  if epoch == '' then
    redis.call('HSET', state, 'epoch', idempotency_keys[1])
    reply[6] = idempotency_keys[1]
  end
end

if not (due or log_is_new or retry_age_ms >= 0) then return reply end
if log_is_new and type(redis.pcall('DEL', corrections)) ~= 'table' then redis.call('HSET', state, 'has_corrections', '0') end
reply[#reply + 1] =
  keep_house(clock_ms, now_ms, last_ms, stored_retention_ms, trimmed_through_ms, unlogged_until_ms, has_corrections)
return reply
