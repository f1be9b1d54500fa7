"""Whether the configured schedule fits the budget, and what one run would cost.

plan           makes the plan and draws it; what one run would cost, and how much of it fits now
simulation     runs the schedule ahead of time
suggestions    finds the smallest changes that would make it fit
"""
