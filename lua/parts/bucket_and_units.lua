-- L2. The bucket and the units in the field `u` of an entry.
local function bucket_and_units(u)
  local bucket, units = string.match(u, '^(.*)=(%d+)$')
  return bucket or 'units', units or u
end
