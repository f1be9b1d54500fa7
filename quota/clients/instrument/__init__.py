"""Charges what programs send through libraries that they use themselves: each is patched where its bytes leave.

    payers       whose budget pays for a request, and what is made of a refusal
    patches      puts patches on, when their modules are there or come, and takes them off again
    LIBRARY      where the bytes of one library leave

The rules of an attempt are those of the transports beside this package; a file here only finds the attempt.
"""
