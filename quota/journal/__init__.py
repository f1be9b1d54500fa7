"""A machine's own copy, in its state folder, of the entries that it read and made in a ledger's log. An entry is lost
if its key is missing from the log.

    journal     the journal of one identity: entries, how far they were compared, facts
    files       its files: lines with checksums, notes, a file for each day, of which the newest grows, and a lock
    draws       draws on the allowance, of all identities of one upstream project

    journals/PROJECT-UPSTREAM/draws           quota.journal.draws
    journals/PROJECT-UPSTREAM/HASH/2026-11-28 entries of an identity, by the day of the newest entry in the file
    journals/PROJECT-UPSTREAM/HASH/notes      how far the entries were compared, and the newest facts

No decision reads a journal. If it is lost, nothing is missing unless the ledger loses entries at the same time.
"""
