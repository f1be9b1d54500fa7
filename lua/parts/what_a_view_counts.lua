-- L2. A function that says what the view of this name counts of an entry, from its bucket, method, job, and units after
-- corrections; nil if it is no view's name.
local function counter(view)
  local buckets, methods, jobs, rest = string.match(view, '^([^|]*)|([^|]*)|([^|]*)|(.+)$')
  if not rest then return nil end
  local calls = string.find(rest, '|calls', 1, true)
  local function selects(list, name)
    if list == '*' then return true end
    name = string.gsub(name, '[%%,|*]', function(c) return string.format('%%%02X', string.byte(c)) end)
    return string.find(',' .. list .. ',', ',' .. name .. ',', 1, true) ~= nil
  end
  return function(bucket, method, job, units)
    if not (selects(buckets, bucket) and selects(methods, method) and selects(jobs, job)) then return 0 end
    return calls and math.min(units, 1) or units
  end
end
