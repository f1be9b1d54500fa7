"""Charges what programs send through libraries that they use themselves: each is patched where its bytes leave.

    seams      where the bytes of each library leave; `http_client` and `grpc` for those two
    unseen     programs that send what nobody sees
    payers     whose budget pays for a request, and what is made of a refusal
    patches    puts patches on, when their modules are there or come, and takes them off again
    tally      what the processes of one run spent

The rules of an attempt are those of the transports beside this package; a file here only finds the attempt.
"""
