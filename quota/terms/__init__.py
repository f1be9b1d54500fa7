"""The words that everybody speaks.

arguments   what callers pass: whole numbers and names, checked, and who spends
limits      a number, a window, and the charges that it counts
api         what a cost book says of its API: hosts, routes, what a request may cost, what an answer tells
costs       the cost book: what each method costs in which bucket
evidence    what an answer of upstream says of a bucket: what others use
"""
