-- charge.lua: charge a call, or refuse it, by one or more sliding limits. For programs in other languages; `quota` itself decides
-- in Python and appends with append.lua.
--
-- Guarantee: one atomic step. When this returns ADMITTED, the charge is in the log; otherwise nothing is written. The script
-- counts the entries in the window, so a window of more than 20,000 entries is an error: use `quota charge` or `quota proxy`.
-- After a lost answer, ask again with the same key: if the longest window has the charge, the script returns it; later it charges
-- again. A grant of upstream lowers no cap here. The script only checks whether upstream closed the charge's own bucket.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms   0 = the server's clock; another value is for tests and simulation
--       2 caller_ms  the caller's clock, compared with the server's; 0 = none
--       3 epoch      of the caller's last reply; '' = any
--       4 key        unique to this attempt, 1 to 100 letters, digits, `-`, `_` or `.`
--       5 units  6 bucket  7 method  8 job  9 region: the charge
--       then four for each limit:
--         counts     BUCKETS|METHODS|JOBS, then |calls if it counts calls. Names with commas between, or * for all
--         cap        the limit
--         cost       what the charge adds to the limit: its units or 1 call; 0 = the limit does not count it
--         window_ms   at most 3,650 days: the log keeps the longest window ever named
-- Reply {OUTCOME, ID, clock_ms, EPOCH, USED of each limit}: USED includes the charge if it was admitted. ID is MS-KEY, as
--       `quota refund` takes it, or empty.
--       ADMITTED  the call is charged under ID: send it
--       REFUSED   USED + cost exceeds the cap of a limit
--       EXHAUSTED upstream said "no more" of this bucket
--       CLOCK     the caller's clock is more than 5 s ahead of the server's, or more than an hour behind it
--       BEHIND    the log has another epoch, or appends are fenced off; any `quota` command repairs the log

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local call, match, args = redis.call, string.match, ARGV
local epoch, key = args[3], args[4]
local FIRST_LIMIT, LIMIT_SIZE, MAX_ENTRIES, MAX_WINDOW_MS = 10, 4, 20000, 315360000000
local CALLER_AHEAD_MS, CALLER_BEHIND_MS = 5000, 3600000

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_lines.lua
-- @include parts/log_standing.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua

local function wrong(what) return redis.error_reply('ERR charge.lua: ' .. what) end
local given_ms, caller_ms, units = whole(args[1]), whole(args[2]), whole(args[5])
if #KEYS ~= 3 or #args < FIRST_LIMIT - 1 + LIMIT_SIZE or (#args - FIRST_LIMIT + 1) % LIMIT_SIZE ~= 0 then
  return wrong('3 keys and 9 arguments are needed, then 4 for each limit')
elseif not (given_ms and caller_ms and units) then
  return wrong('clock_ms, caller_ms and units are whole numbers from 0')
elseif #key > 100 or not match(key, '^[%w._-]+$') then
  return wrong('key is 1 to 100 letters, digits, `-`, `_` or `.`')
end
for at = 6, 9 do
  local letters = string.gsub(args[at], '[\128-\191]', '') -- without what follows the first byte of a letter
  if #letters > 64 or string.find(letters, '%c') then return wrong('names have at most 64 characters, none of control') end
end
local limits, longest_ms = {}, 0
for at = FIRST_LIMIT, #args, LIMIT_SIZE do
  local buckets, methods, jobs, rest = match(args[at], '^([^|]+)|([^|]+)|([^|]+)(.*)$')
  local cap, cost, window_ms = whole(args[at + 1]), whole(args[at + 2]), whole(args[at + 3])
  local is_window = window_ms and window_ms > 0 and window_ms <= MAX_WINDOW_MS
  if not (cap and cost and is_window and (rest == '' or rest == '|calls')) then
    return wrong('a limit is BUCKETS|METHODS|JOBS or BUCKETS|METHODS|JOBS|calls, then cap, cost and window_ms')
  end
  limits[#limits + 1] = { buckets = buckets, methods = methods, jobs = jobs, calls = rest ~= '', cap = cap,
    cost = cost, window_ms = window_ms, used = 0, others = {} }
  longest_ms = math.max(longest_ms, window_ms)
end

local clock_ms = clock(given_ms)
local fields = call('HMGET', state, 'epoch', 'holds', 'trimmed', 'longest_ms', 'facts')
local holds = tonumber(fields[2] or 0) or 0
local stored, is_closed = standing(fields[1] or '', holds)
local trimmed = fields[3] or '0-0'
if is_closed or (epoch ~= '' and epoch ~= stored) then return { 'BEHIND', '', clock_ms, stored } end
if caller_ms > 0 and (caller_ms > clock_ms + CALLER_AHEAD_MS or caller_ms < clock_ms - CALLER_BEHIND_MS) then
  return { 'CLOCK', '', clock_ms, stored }
end
-- Charges leave the window by the slower clock, so that a fast clock frees no budget.
local now_ms = caller_ms > 0 and math.min(clock_ms, caller_ms + CALLER_AHEAD_MS) or clock_ms
local since = int(math.max(0, now_ms - longest_ms + 1)) .. '-0'
local entries = call('XRANGE', log, since, '+', 'COUNT', MAX_ENTRIES + 1)
if #entries > MAX_ENTRIES then return wrong('the window has more than 20,000 entries; use `quota charge`') end

local function selects(list, name) return list == '*' or string.find(',' .. list .. ',', ',' .. name .. ',', 1, true) end
local function cost(limit, n) return limit.calls and math.min(n, 1) or n end
-- The same rules as RunningTotal in quota/rules/total.py.
local function count(limit, came_ms, entry)
  local cutoff_ms, kind, of = now_ms - limit.window_ms, entry.kind, entry.of
  if came_ms <= cutoff_ms or not selects(limit.buckets, entry.bucket) then return end
  if kind == 'o' then
    local heard_ms, is_narrow = tonumber(entry.method), limit.methods ~= '*' or limit.jobs ~= '*'
    local is_as_long = not heard_ms or (24 * limit.window_ms <= 25 * heard_ms and 24 * heard_ms <= 25 * limit.window_ms
      and (not limit.calls or entry.region == 'calls'))
    local leaves_ms = math.min(entry.at_seq + 0, came_ms + limit.window_ms)
    if is_narrow or not is_as_long or leaves_ms <= now_ms then return end
    limit.others[of] = math.max(limit.others[of] or 0, entry.units)
  elseif selects(limit.methods, entry.method) and selects(limit.jobs, entry.job) then
    if kind == '' then limit.used = limit.used + cost(limit, entry.units) end
    local is_counted = kind == 'c' and entry.at_ms + 0 > cutoff_ms and before(trimmed, entry.at_ms .. '-' .. entry.at_seq)
    if is_counted then limit.used = limit.used + cost(limit, entry.units) - cost(limit, entry.before_units) end
  end
end
local earlier
for _, row in ipairs(entries) do
  local entry, came_ms = entry_in(line_of(row)), match(row[1], '^%d+')
  if entry and entry.key == key then earlier = came_ms .. '-' .. key end
  for _, limit in ipairs(entry and limits or {}) do count(limit, came_ms + 0, entry) end
end
-- Whether upstream closed the bucket, as `closing` in quota/rules/facts.py.
local is_exhausted, is_read, facts = false, pcall(cjson.decode, fields[5] or '{}')
for _, exhaustion in ipairs(is_read and type(facts) == 'table' and facts.version == 1 and facts.exhaustions or {}) do
  local of, _, until_ms, _, _, reopened_ms = unpack(exhaustion)
  is_exhausted = is_exhausted or (of == args[6] and reopened_ms == 0 and until_ms > now_ms)
end
local fits = not is_exhausted
for _, limit in ipairs(limits) do
  for _, n in pairs(limit.others) do limit.used = limit.used + n end
  fits = fits and (limit.cost == 0 or limit.used + limit.cost <= limit.cap)
end
local outcome = (earlier or fits) and 'ADMITTED' or is_exhausted and 'EXHAUSTED' or 'REFUSED'
local reply = { outcome, earlier or '', clock_ms, stored }
for n, limit in ipairs(limits) do
  reply[n + 4] = limit.used + (fits and not earlier and limit.cost or 0)
end
if earlier or not fits then return reply end

local newest = call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
-- @include parts/next_id.lua
local ms, seq = next_id(newest and newest[1] or trimmed, clock_ms, tonumber(string.sub(redis.sha1hex(key), 1, 10), 16))
try_rights()
call('HSET', state, 'epoch', stored ~= '' and stored or key, 'holds', math.max(holds, 1),
  'longest_ms', int(math.max(longest_ms, whole(fields[4]) or 0)))
call('XADD', log, ms .. '-' .. int(seq), 'e', table.concat({ int(units), key, args[6], args[7], args[8], args[9] }, '\t'))
live_on()
reply[2], reply[4] = ms .. '-' .. key, stored ~= '' and stored or key
return reply
