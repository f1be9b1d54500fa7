-- change.lua: change fields of a project's state if they have the expected texts, and append a marker to the log.
--
-- Guarantee: one atomic step. If a field is not as expected, nothing changes; nor while appends are fenced off, unless the caller
-- expects exactly this epoch. So it sets and renews a fence, which ends appends for a moment, and a seal, which is kept for 400
-- days. The marker tells every author of a decision to read the state again.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms   0 = the server's clock; another value is for tests and simulation
--       2 seq        the first number of a new millisecond
--       3 marker     the line of an entry, or ''
--       4 new_epoch  the epoch for an empty log that gets the marker
--       5 expected   the number of expected fields; then NAME TEXT of each, then NAME TEXT of each field to set. A text begins
--                    with `=`; `-` means that the field does not exist
-- Reply {done, clock_ms, epoch, tip, trimmed, NAME, TEXT, NAME, TEXT, ...}: `done` is 1 if the fields changed. `tip` is the newest
--       entry. Then the fields that exist now

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local call, args = redis.call, ARGV
local seq, marker, new_epoch, expected = args[2], args[3], args[4], tonumber(args[5])
local FIRST = 6
local SEALED_MS = 34560000000
local FIRST_BECOMES = FIRST + 2 * expected

-- @include parts/clock.lua
-- @include parts/log_standing.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua

local clock_ms = clock(args[1] + 0)
local names = { 'HMGET', state, 'epoch', 'holds', 'trimmed' }
local FIRST_TEXT = #names - 1
for at = FIRST, #args, 2 do names[#names + 1] = args[at] end
local fields = call(unpack(names))
local holds = tonumber(fields[2] or 0) or 0
local epoch, is_closed = standing(fields[1] or '', holds)
local newest = call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local tip, trimmed = newest and newest[1] or '0-0', fields[3] or '0-0'

local done, texts = FIRST_BECOMES <= #args, {}
for at = FIRST, #args, 2 do
  local text = fields[FIRST_TEXT + (at - FIRST) / 2]
  if args[at] == 'epoch' then
    text = epoch ~= '' and epoch or nil
    if at < FIRST_BECOMES then is_closed = false end -- this epoch, or else nothing changes
  end
  texts[args[at]] = text
  if at < FIRST_BECOMES and args[at + 1] ~= (text and '=' .. text or '-') then done = false end
end
done = done and not is_closed
if done then
  try_rights()
  if marker ~= '' then
    if epoch == '' then epoch = new_epoch end
    holds = math.max(holds, 1)
  end
  call('HSET', state, 'holds', holds)
  if epoch ~= '' then call('HSET', state, 'epoch', epoch) end
  for at = FIRST_BECOMES, #args, 2 do
    local name, text = args[at], args[at + 1] ~= '-' and string.sub(args[at + 1], 2)
    texts[name] = text
    if text then call('HSET', state, name, text) else call('HDEL', state, name) end
    if name == 'epoch' then epoch = text or '' end
  end
  if marker ~= '' then
-- @include parts/next_id.lua
    local ms, next_seq = next_id(newest and tip or trimmed, clock_ms, seq)
    tip = ms .. '-' .. int(next_seq)
    call('XADD', log, tip, 'e', marker)
  end
  live_on()
  if string.sub(epoch, 1, 1) == '!' then call('PEXPIRE', state, SEALED_MS) end
end
local reply = { done and 1 or 0, clock_ms, epoch, tip, trimmed }
for name, text in pairs(texts) do
  if text then
    reply[#reply + 1] = name
    reply[#reply + 1] = text
  end
end
return reply
