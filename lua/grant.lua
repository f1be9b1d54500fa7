-- grant.lua: remember what upstream says it grants, where that is less than the callers believe.
--
-- Guarantee: all that was remembered before is replaced, in one step; the same text again changes nothing. A caller that
-- passes another text with its next call of charge.lua is answered GRANTED. The rule is L28 in ARCHITECTURE.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written)
-- ARGV  1 granted        BUCKET=UNITS:SINCE_MS:UNTIL_MS, sorted, with `;` between; empty = nothing is remembered
--       2 retention_ms   the state lives at least as long from now on
-- Reply the text

local state, granted, retention_ms = KEYS[2], ARGV[1], tonumber(ARGV[2])

-- >>> format
-- An error where the state's field `format` (false: there is none) is not ours (L24), or where `epoch` (false: there is none)
-- says that the ledger has moved or is being filled (L27). Else nil, also for a new state.
local FORMAT = '2'
local function other_format(found, epoch)
  local peer = string.match(epoch or '', '^!(.*)')
  if found == FORMAT and peer then
    if string.sub(peer, 1, 1) ~= '<' then
      return redis.error_reply('ERR the ledger has moved to ' .. peer .. ' and takes no charge here any more')
    end
    return redis.error_reply('ERR the ledger is being moved here from ' .. string.sub(peer, 2)
      .. ' and takes no charge until all of it is here')
  end
  if found == FORMAT or (not found and redis.call('EXISTS', KEYS[2]) == 0) then return nil end
  return redis.error_reply('ERR the ledger has format ' .. (found or '0') .. ', and this script needs ' .. FORMAT
    .. ': use the scripts of its version, or delete its keys, and with them what was charged')
end
-- <<< format

local left = granted and string.gsub(granted .. ';', '[%w._:-]+=%d+:%d+:%d+;', '')
if not (retention_ms and retention_ms >= 1 and (left == '' or granted == '')) then
  return redis.error_reply('ERR grant.lua: granted is BUCKET=UNITS:SINCE_MS:UNTIL_MS;..., and retention_ms a number')
end
local known = redis.call('HMGET', state, 'format', 'granted', 'epoch')
local unknown_format = other_format(known[1], known[3])
if unknown_format then return unknown_format end
if granted == (known[2] or '') and granted == '' then return granted end
local short = redis.call('PTTL', state) < retention_ms
-- Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, retention_ms) end
if granted == '' then redis.call('HDEL', state, 'granted')
else redis.call('HSET', state, 'format', FORMAT, 'granted', granted) end
if short then redis.call('PEXPIRE', state, retention_ms) end
return granted
