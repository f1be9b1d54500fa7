-- Redis takes nothing back when a script fails. So what this user may not run fails here, where it changes nothing.
local function try_rights()
  local none = state .. ':none'
  redis.call('XADD', none, 'NOMKSTREAM', '*', 'e', '')
  redis.call('XTRIM', none, 'MAXLEN', '0')
  redis.call('HDEL', none, 'f')
  redis.call('DEL', none)
  redis.call('PEXPIRE', none, '1')
end
