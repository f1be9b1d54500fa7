-- examine.lua: read the state of the server and of this project's keys, for `quota doctor`.
--
-- Guarantee: changes nothing.
--
-- KEYS  1 log, 2 state, 3 corrected, 4 past (see append.lua)
-- Reply { info, lifetimes, missing, refused }
--       info        the server's INFO with its commandstats; empty if this user may not read it
--       lifetimes   the lifetime of each key in ms; -2 = no such key, -1 = no lifetime
--       missing     the commands that the scripts need and this user may not run
--       refused     why the server accepts no charge from any user: a replica, out of memory; empty if it accepts charges

-- The commands of all scripts that this user may not run. Tries each of them where it changes nothing.
local function missing_rights()
  local none, missing = KEYS[2] .. ':none', {}
  for _, words in ipairs({
    { 'DEL', none }, { 'EXISTS', none }, { 'HDEL', none, 'f' }, { 'HGET', none, 'f' }, { 'HKEYS', none }, { 'HLEN', none },
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

-- The error of a command, or nil.
local function failure(reply) return type(reply) == 'table' and reply.err or nil end

local lifetimes = {}
for n, key in ipairs(KEYS) do
  local lifetime_ms = redis.pcall('PTTL', key)
  lifetimes[n] = failure(lifetime_ms) and -2 or lifetime_ms
end
local info = redis.pcall('INFO')
-- This must be the first command that can write: once a write was accepted, later ones do not fail for lack of memory.
local refused = failure(redis.pcall('XADD', KEYS[2] .. ':none', 'NOMKSTREAM', '*', 'f', 'v'))
local missing = missing_rights()
local commands = redis.pcall('INFO', 'commandstats')
info = failure(info) and '' or info .. (failure(commands) and '' or commands)
return { info, lifetimes, missing, #missing == 0 and refused or '' }
