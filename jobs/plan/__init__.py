"""Whether the configured schedule fits the budget: a simulation of the coming days."""
