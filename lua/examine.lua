-- examine.lua: what an operator should know of the server and of this project's keys. For `quota doctor`.
--
-- Guarantee: nothing is changed.
--
-- KEYS  1 log, 2 state, 3 corrected, 4 past (see append.lua)
-- Reply { info, lifetimes, missing, refused }
--       info        the server's INFO with its commandstats; empty where this user may not see it
--       lifetimes   for each key its lifetime in ms; -2 where it is missing, -1 where it has none
--       missing     the commands that the scripts need, and this user may not run
--       refused     why the server takes no charge from anybody now: a replica, out of memory; empty where it takes one

-- Of the commands of all scripts, those that this user may not run. Each is tried where it changes nothing.
local function missing_rights()
  local none, missing = KEYS[2] .. ':none', {}
  for _, words in ipairs({
    { 'DEL', none }, { 'EXISTS', none }, { 'HDEL', none, 'f' }, { 'HGET', none, 'f' }, { 'HGETALL', none }, { 'HLEN', none },
    { 'HMGET', none, 'f' }, { 'HSET', none, 'f', 'v', 'without a value' }, { 'PEXPIRE', none, '1' }, { 'PTTL', none },
    { 'RENAME', none, none }, { 'TIME' }, { 'XADD', none, 'NOMKSTREAM', '*', 'e', '' }, { 'XLEN', none },
    { 'XRANGE', none, '-', '+' }, { 'XREVRANGE', none, '+', '-' }, { 'XTRIM', none, 'MAXLEN', '0' },
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

-- What a command failed with; nil where it did not.
local function failure(reply) return type(reply) == 'table' and reply.err or nil end

local lifetimes = {}
for n, key in ipairs(KEYS) do
  local lifetime_ms = redis.pcall('PTTL', key)
  lifetimes[n] = failure(lifetime_ms) and -2 or lifetime_ms
end
local info = redis.pcall('INFO')
-- The first command that could write: after one that the server took, it refuses none for want of memory.
local refused = failure(redis.pcall('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v'))
local missing = missing_rights()
local commands = redis.pcall('INFO', 'commandstats')
info = failure(info) and '' or info .. (failure(commands) and '' or commands)
return { info, lifetimes, missing, #missing == 0 and refused or '' }
