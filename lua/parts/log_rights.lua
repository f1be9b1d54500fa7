-- Redis does not undo the writes of a script that fails. So a command that this user may not run fails here, before any write.
local function try_rights()
  local none = state .. ':none'
  redis.call('XADD', none, 'NOMKSTREAM', '*', 'e', '')
  redis.call('XRANGE', none, '-', '+')
  redis.call('XREVRANGE', none, '+', '-')
  redis.call('XTRIM', none, 'MAXLEN', '0')
  redis.call('HGET', none, 'f')
  redis.call('HDEL', none, 'f')
  redis.call('DEL', none)
  redis.call('PEXPIRE', none, '1')
end
