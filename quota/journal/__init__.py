"""What a machine has read and made of a ledger's log, kept in its state folder. Lost is what is missing by key.

    journal     the journal of one identity: its entries, how far they were compared, facts
    files       its files: lines that say whether they are whole, marks, and a file a day, of which the newest grows
    draws       what was drawn while the ledger did not answer, of all identities of one upstream project
    lock        what only one process of the machine does at a time

    journals/PROJECT-UPSTREAM/draws           quota.journal.draws
    journals/PROJECT-UPSTREAM/HASH/2026-11-28 the entries of an identity, by the day of the newest of them
    journals/PROJECT-UPSTREAM/HASH/marks      how far they were compared, and from where to where they are whole
    journals/PROJECT-UPSTREAM/HASH/facts      the newest facts

A journal decides nothing, and its loss costs no more than what the ledger loses at the same time.
"""
