-- examine.lua: what an operator should know of the server and of this project's keys. For `quota doctor`.
--
-- Guarantee: nothing that counts is changed. One scratch key is set for a second.
--
-- KEYS  1 log, 2 state, 3 corrections (see charge.lua), 4 history (see roll_up.lua)
--       5 scratch   quota:{PROJECT}:scratch, which nothing else uses
-- ARGV  names of commands, in capitals: those that the scripts need
-- Reply { info, lifetimes, forbidden }
--       info        the server's INFO; empty where this user may not see it
--       lifetimes   for each of the first four keys its lifetime in ms; -2 where it is missing, -1 where it has none
--       forbidden   those of the commands that this user may not run, or that the script does not know how to try

local scratch, missing = KEYS[5], KEYS[5] .. ':none'

-- Each command so that it changes nothing: on a key that is not there, or of another type.
local harmless = {
  DEL = { missing }, EXISTS = { missing }, GET = { missing }, HDEL = { missing, 'f' }, HGET = { missing, 'f' },
  HGETALL = { missing }, HMGET = { missing, 'f' }, HSCAN = { missing, '0' }, HSET = { scratch, 'f', 'v' }, INFO = {},
  PEXPIRE = { missing, '1' }, PTTL = { missing }, SET = { scratch, '1', 'PX', '1000' }, TIME = {},
  XADD = { missing, 'NOMKSTREAM', '*', 'f', 'v' }, XRANGE = { missing, '-', '+', 'COUNT', '1' },
  XREVRANGE = { missing, '+', '-', 'COUNT', '1' }, XTRIM = { missing, 'MAXLEN', '0' },
}

-- What a command failed with; nil where it did not.
local function failure(reply) return type(reply) == 'table' and reply.err or nil end

redis.pcall('SET', scratch, '1', 'PX', '1000')
local forbidden = {}
for _, command in ipairs(ARGV) do
  local arguments = harmless[command]
  local failed = not arguments or failure(redis.pcall(command, unpack(arguments)))
  if failed and not (arguments and string.find(failed, 'WRONGTYPE', 1, true)) then forbidden[#forbidden + 1] = command end
end

local lifetimes = {}
for n = 1, 4 do
  local lifetime_ms = redis.pcall('PTTL', KEYS[n])
  lifetimes[n] = failure(lifetime_ms) and -2 or lifetime_ms
end
local info = redis.pcall('INFO')
return { failure(info) and '' or info, lifetimes, forbidden }
