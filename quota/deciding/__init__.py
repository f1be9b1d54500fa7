"""How a budget decides: it asks the ledger, reads the answer, and corrects charges afterwards.

decide        the question of a decision and its outcome. It reads, compares, and has the ledger append. Calls are
              refused here
project       one project's log, as far as this process has read it. Threads share it
answers       turns an outcome into the decision for the caller
losses        puts back charges that a ledger has lost
corrections   appends entries that no limit refuses
allowance     spends while the ledger does not answer
run_limit     bounds what one run may spend
spend         settles a call by its true cost, and charges around a block
keys          makes the key of each attempt
recorder      reports refusals to the ledger
outlook       the state of a budget, for people
history       past charges, for people
fence         keeps everybody from appending while a log is replaced by:
moves         `quota ledger move`
repairs       `quota ledger repair`
"""
