-- names.lua: list the fields that callers keep in a project's state: facts, claims, places, refusals.
--
-- Guarantee: one atomic step that changes nothing.
--
-- KEYS  1 state, as in append.lua
-- Reply {NAME, NAME, ...}, unordered, without views and without the log's own fields

local OF_THE_LOG = { epoch = true, holds = true, trimmed = true, keep_ms = true, until_ms = true }
local fields, names = redis.call('HGETALL', KEYS[1]), {}
for at = 1, #fields, 2 do
  local name = fields[at]
  if not OF_THE_LOG[name] and string.sub(name, 1, 5) ~= 'view:' then names[#names + 1] = name end
end
return names
