-- Inbound limits on one machine. One file serves several worker processes (WAL). Times are milliseconds since 1970.
-- The rules (I1, I2, ...) are in docs/inbound-algorithms.md. PRAGMA user_version is the version of this format.

-- Each limit that was ever used, under a small number.
CREATE TABLE limits (
    id        INTEGER PRIMARY KEY,
    rule      TEXT    NOT NULL,
    kind      TEXT    NOT NULL,      -- the algorithm; for gcra with the limit's number, on which its states depend
    window_ms INTEGER NOT NULL,
    UNIQUE (rule, kind, window_ms)
);

-- I5. The state of one identity in one limit and window. States that expire together are adjacent.
CREATE TABLE states (
    expires_ms INTEGER NOT NULL,     -- the end of the window after this one
    limit_id   INTEGER NOT NULL,
    name       INTEGER NOT NULL,     -- the identity's name in this window: 8 bytes as a number (I3)
    state                NOT NULL,   -- counter, gcra: an integer; log: a blob, see `packed` in sqlite_storage.py
    PRIMARY KEY (expires_ms, limit_id, name)
) WITHOUT ROWID;

-- I4. A permanent salt has the name of the ms from which it applies, a salt of a day "WINDOW_MS:DAY". `shard` is not used
-- here.
CREATE TABLE salts (
    name     TEXT    PRIMARY KEY,
    salt     TEXT    NOT NULL,       -- hexadecimal digits
    until_ms INTEGER NOT NULL
) WITHOUT ROWID;

-- I8. The totals of all workers.
CREATE TABLE totals (
    name  TEXT    PRIMARY KEY,
    total INTEGER NOT NULL
) WITHOUT ROWID;

-- I8. How many identities a window met: new identities, and identities that the window before had met (again).
CREATE TABLE met (
    rule      TEXT    NOT NULL,
    window_ms INTEGER NOT NULL,
    number    INTEGER NOT NULL,
    new       INTEGER NOT NULL,
    again     INTEGER NOT NULL,
    until_ms  INTEGER NOT NULL,
    PRIMARY KEY (rule, window_ms, number)
) WITHOUT ROWID;
