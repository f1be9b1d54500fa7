-- What the view counts of an entry. Its name is taken apart only where there are entries to be read.
local function counter_of_entries(view)
  local count = counter(view)
  return function(entry)
    local f = entry[2]
    local bucket, charged = bucket_and_units(f[2])
    local counted = has_corrections and call('HGET', corrections, entry[1]) or charged
    return count(bucket, f[4], f[6], math.max(0, tonumber(counted)))
  end
end
