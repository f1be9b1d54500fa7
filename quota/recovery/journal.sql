-- The journal of the local allowance: what this machine spent while its ledger could not answer.

-- The name by which a ledger knows this journal. A new file has a new name, so its numbers may begin again at 1.
CREATE TABLE machine (id TEXT NOT NULL);
INSERT INTO machine VALUES (lower(hex(randomblob(8))));

-- One row for each call that was admitted. Kept while it counts against the allowance, repaid or not.
CREATE TABLE draws (
    number          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: the ledger remembers the last one repaid. From the time, in ms
    identity        TEXT    NOT NULL,  -- who owes it: the hash of a quota.ledger.identity.Identity
    upstream        TEXT    NOT NULL,  -- whose allowance it is: the hash of its project and endpoint
    project         TEXT    NOT NULL,
    drawn_ms        INTEGER NOT NULL,
    units           INTEGER NOT NULL,
    bucket          TEXT    NOT NULL,
    method          TEXT    NOT NULL,
    job             TEXT    NOT NULL,
    region          TEXT    NOT NULL,
    idempotency_key TEXT    NOT NULL,
    repaid          INTEGER NOT NULL DEFAULT 0,
    corrected       INTEGER NOT NULL DEFAULT 0  -- its units were changed; the ledger may have been told the old number
);
CREATE INDEX draws_of_upstream ON draws (upstream, drawn_ms);
CREATE INDEX draws_owed ON draws (identity, number) WHERE NOT repaid;

-- The longest window of any configuration that drew for an upstream project. A draw is kept for twice as long. Only grows.
CREATE TABLE longest_windows (
    upstream  TEXT    PRIMARY KEY,
    window_ms INTEGER NOT NULL
) WITHOUT ROWID;
