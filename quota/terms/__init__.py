"""The terms that all other wings use: limits, cost books, and what callers pass.

arguments   checks what callers pass: whole numbers, names, functions, and who spends
limits      a number, a window, and a selector of charges
api         how a cost book describes its API: hosts, routes, the bound of a request, rules for answers
costs       the cost book: the price of each method in its buckets
evidence    what an answer says about a bucket: how much others use
"""
