-- inbound_totals.lua: add the counts of a worker to the totals that all workers share.
--
-- Guarantee: one atomic step. Rule I8 in docs/inbound-algorithms.md.
--
-- KEYS  1 totals   hash: whole numbers by name
--       then a hash for each window that met identities: `again` = identities that the window before had met too, `new` = others
-- ARGV  1 count    of totals, at most 1,000
--       then for each total: name, number to add
--       then for each further key: new, again, and its lifetime in ms
-- Reply 1

local FIRST, MAX_TOTALS = 2, 1000
local TOTALS_KEPT_MS = 3024000000 -- 35 days
local count = tonumber(ARGV[1])
if not (count and count >= 0 and count <= MAX_TOTALS and #KEYS >= 1 and #KEYS <= MAX_TOTALS
    and #ARGV == 1 + 2 * count + 3 * (#KEYS - 1)) then
  return redis.error_reply('ERR inbound_totals.lua: up to 1000 totals, and three numbers for each further key, are needed')
end
for first = FIRST, 1 + 2 * count, 2 do redis.call('HINCRBY', KEYS[1], ARGV[first], ARGV[first + 1]) end
if count > 0 then redis.call('PEXPIRE', KEYS[1], TOTALS_KEPT_MS) end
for n = 2, #KEYS do
  local first = 2 + 2 * count + 3 * (n - 2)
  redis.call('HINCRBY', KEYS[n], 'new', ARGV[first])
  redis.call('HINCRBY', KEYS[n], 'again', ARGV[first + 1])
  redis.call('PEXPIRE', KEYS[n], ARGV[first + 2])
end
return 1
