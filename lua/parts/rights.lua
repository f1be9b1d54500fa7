-- L22. Of the commands of all these scripts, those that this user of the server may not run. Each is tried where it changes
-- nothing: Redis takes nothing back when a script fails.
local function missing_rights()
  local none, missing = KEYS[2] .. ':none', {}
  for _, words in ipairs({
    { 'DEL', none }, { 'EXISTS', none }, { 'HDEL', none, 'f' }, { 'HGET', none, 'f' }, { 'HGETALL', none },
    { 'HMGET', none, 'f' }, { 'HSCAN', none, '0' }, { 'HSET', none, 'f', 'v', 'without a value' }, { 'PEXPIRE', none, '1' },
    { 'PTTL', none }, { 'RENAME', none, none }, { 'SET', none, 'v', 'XX' }, { 'TIME' },
    { 'XADD', none, 'NOMKSTREAM', '*', 'f', 'v' }, { 'XLEN', none }, { 'XRANGE', none, '-', '+' },
    { 'XREVRANGE', none, '+', '-' }, { 'XTRIM', none, 'MAXLEN', '0' },
  }) do
    local reply = redis.pcall(unpack(words))
    local failed = type(reply) == 'table' and reply.err
    if failed and (string.find(failed, "user executing the script can't", 1, true) or string.find(failed, '[Nn]o permission'))
    then
      missing[#missing + 1] = words[1]
    end
  end
  return missing
end
