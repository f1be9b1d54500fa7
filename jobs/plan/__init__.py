"""Whether the configured schedule fits the budget, and what one run would cost.

plan           makes the plan, and draws it
simulation     runs the schedule ahead of time
suggestions    finds the smallest changes that would make it fit
ahead          counts the cost of one run, and how much of it fits now
"""
