"""How a budget comes to its decision: what to ask the ledger, what its answer means, what to correct afterwards.

question      what a decision is asked, what it sees, what it answers
project       one project's log, as the threads of a process share it. Here a call is refused
answers       the decision that follows, for the caller
losses        puts back what a ledger has lost
corrections   appends what is never refused
allowance     spends while the ledger does not answer
run_limit     what one run may spend, whatever the ledger says
spend         what a call really cost, and a charge around a block
recorder      tells the ledger what was refused
outlook       what people are shown of a budget
history       what was charged, for people
fence         keeps everybody from appending, while one of these puts another log in its place:
moves         `quota ledger move`
repairs       `quota ledger repair`
"""
