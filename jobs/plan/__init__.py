"""Whether the configured schedule fits the budget, and what one run would cost.

plan           the answer, and how it looks
simulation     the schedule, run ahead of time
suggestions    the smallest changes that would make it fit
ahead          the cost of one run, and how much of it fits now
"""
