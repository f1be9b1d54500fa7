"""Random and damaged input to everything that reads what others wrote. See `fuzz.inputs` for how one is repeated."""
