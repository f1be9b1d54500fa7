-- All keys live at least so long from now on.
local function live_on(keep_ms)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < keep_ms then redis.call('PEXPIRE', key, keep_ms) end
  end
end
