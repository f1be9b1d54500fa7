"""Charges what programs send through their own HTTP libraries: each library is patched where its bytes leave.

    seams        where the bytes of each library leave; `grpc` has those of gRPC
    payers       the credentials that pay for requests, and the answer to a refused request
    patches      puts patches on modules, loaded or to be loaded, and takes them off again
    processes    what the processes of one run spent, and programs whose requests no seam sees

The files here only find the attempts; the transports beside this package have the rules.
"""

TALLY = "QUOTA_AUTO_TALLY"
"""The variable with the folder in which the processes of `quota exec --auto` count what they spend."""
