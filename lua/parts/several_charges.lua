-- L1. Several charges, of which each argument has a line for each: their words, { u, method, job, region, idempotency_key }, one
-- behind the other; all their units, nil where a `u` is none; and a function that says what a view counts of them together, nil
-- if it is no view's name. Nothing where the arguments have not as many lines.
local function several_charges(...)
  local charges, units = {}, 0
  for place, text in ipairs({ ... }) do
    local lines = 0
    for line in string.gmatch(text .. '\n', '([^\n]*)\n') do
      lines = lines + 1
      if place == 1 then charges[lines] = {} end
      if charges[lines] then charges[lines][place] = line end
    end
    if lines ~= #charges then return nil end
  end
  for _, charge in ipairs(charges) do
    charge.bucket, charge.units = bucket_and_units(charge[1])
    charge.units = tonumber(string.match(charge.units, '^%d+$'))
    units = units and charge.units and charge.units <= MAX_UNITS and units + charge.units
  end
  return charges, units, function(view)
    local counts, sum = counter(view), 0
    for _, charge in ipairs(counts and charges or {}) do
      sum = sum + counts(charge.bucket, charge[2], charge[3], charge.units)
    end
    return counts and sum
  end
end
