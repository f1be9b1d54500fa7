-- An error where the state's field `format` (false: there is none) is not ours (L24), or where `epoch` (false: there is none)
-- says that the ledger has moved or is being filled (L27). Else nil, also for a new state.
local FORMAT = '5'
local function other_format(found, epoch)
  local peer = epoch and string.sub(epoch, 1, 1) == '!' and string.sub(epoch, 2)
  if found == FORMAT and peer then
    local way = string.match(peer, '^[<>]')
    local what = way == '<' and 'is being moved here from ' or way == '>' and 'is being moved to ' or 'has moved to '
    local since = way and ' and takes no charge until that is done' or ' and takes no charge here any more'
    return redis.error_reply('ERR the ledger ' .. what .. string.sub(peer, way and 2 or 1) .. since)
  end
  if found == FORMAT or (not found and redis.call('EXISTS', KEYS[2]) == 0) then return nil end
  return redis.error_reply('ERR the ledger has format ' .. (found or '0') .. ', and this script needs ' .. FORMAT
    .. ': use the scripts of its version, or delete its keys, and with them what was charged')
end
