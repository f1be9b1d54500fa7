"""Charges what programs send through their own HTTP libraries: each library is patched where its bytes leave.

    seams      where the bytes of each library leave; `http_client` and `grpc` have the other two
    unseen     programs whose requests no seam sees
    payers     the credentials that pay for requests, and the answer to a refused request
    patches    puts patches on modules, loaded or to be loaded, and takes them off again
    tally      what the processes of one run spent

The files here only find the attempts; the transports beside this package have the rules.
"""
