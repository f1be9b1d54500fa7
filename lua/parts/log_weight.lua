-- How much an unread entry takes of an author's room, as `weight` in quota/ledger/log.py.
local function has(names, name)
  for _, named in ipairs(names) do
    if named == name then return true end
  end
  return #names == 0
end
local function weight(entry, room)
  local units, before_units = entry.units, entry.before_units
  if room then
    local _, counts_calls, buckets, methods, jobs = unpack(room)
    if not has(buckets, entry.bucket) then return 0 end
    if entry.kind ~= 'o' then
      if not (has(methods, entry.method) and has(jobs, entry.job)) then return 0 end
      if counts_calls == 1 then units, before_units = math.min(units, 1), math.min(before_units, 1) end
    end
  end
  return entry.kind == 'c' and math.max(0, units - before_units) or math.max(1, units)
end
