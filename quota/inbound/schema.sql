-- Inbound limits on one machine. One file serves several worker processes (WAL). Times are milliseconds since 1970.
-- The rules (I1, I2, ...) are in docs/inbound-algorithms.md. PRAGMA user_version is the version of this format.

-- Each limit that was ever asked for, under a small number.
CREATE TABLE limits (
    id        INTEGER PRIMARY KEY,
    rule      TEXT    NOT NULL,
    kind      TEXT    NOT NULL,      -- the algorithm; gcra also with the limit's number, which its states depend on
    window_ms INTEGER NOT NULL,
    UNIQUE (rule, kind, window_ms)
);

-- I5. What a limit knows of one identity in one window. All that expires together stands together.
CREATE TABLE states (
    expires_ms INTEGER NOT NULL,     -- the end of the window after it
    limit_id   INTEGER NOT NULL,
    name       INTEGER NOT NULL,     -- of the identity in that window, its 8 bytes as a number (I3)
    state                NOT NULL,   -- counter, gcra: an integer; log: a blob, see `packed` in sqlite_storage.py
    PRIMARY KEY (expires_ms, limit_id, name)
) WITHOUT ROWID;

-- I4. `shard` is not used here; permanent salts stand under the ms since which they are used; the others under
-- "WINDOW_MS:DAY".
CREATE TABLE salts (
    name     TEXT    PRIMARY KEY,
    salt     TEXT    NOT NULL,       -- hexadecimal digits
    until_ms INTEGER NOT NULL
) WITHOUT ROWID;

-- I8. What all workers counted.
CREATE TABLE totals (
    name  TEXT    PRIMARY KEY,
    total INTEGER NOT NULL
) WITHOUT ROWID;

-- I8. How many identities were met in a window: new ones, and those that the window before had too.
CREATE TABLE met (
    rule      TEXT    NOT NULL,
    window_ms INTEGER NOT NULL,
    number    INTEGER NOT NULL,
    new       INTEGER NOT NULL,
    again     INTEGER NOT NULL,
    until_ms  INTEGER NOT NULL,
    PRIMARY KEY (rule, window_ms, number)
) WITHOUT ROWID;
