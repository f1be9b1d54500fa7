"""Whether the configured schedule fits the budget.

plan           the answer, and how it looks
simulation     the schedule, run ahead of time
suggestions    the smallest changes that would make it fit
"""
