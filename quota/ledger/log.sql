-- The embedded ledger: the logs of all projects of one machine. One file serves many processes (WAL).
-- quota/ledger/log.py has the contract of a log; these are its tables. PRAGMA user_version is the format's version.
--
-- Times are milliseconds since 1970. An id is (ms, seq): a time, and a number within that millisecond. A `line` is an
-- entry as quota/rules/entry.py packs it, without its id. An unreadable line counts nothing and causes no error.

-- The entries, in order, for the longest window ever named and a long day.
CREATE TABLE log (
    project TEXT    NOT NULL,
    ms      INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    line    TEXT    NOT NULL,
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;

-- The newest correction of each charge, while the log has it, by the charge's key: the charge's units, and the
-- correction's id.
CREATE TABLE corrected (
    project TEXT    NOT NULL,
    key     TEXT    NOT NULL,
    units   INTEGER NOT NULL,
    ms      INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    PRIMARY KEY (project, key)
) WITHOUT ROWID;

-- Named texts.
--
--   epoch        names the log. ~TOKEN:END_MS is a fence, !URL a seal. A log without an epoch, or an epoch without a log,
--                has lost its other half: nobody appends until somebody has rebuilt it
--   trimmed      MS-SEQ: entries at or before it have left the log. Without it, an empty log must not have an epoch
--   view:NAME    totals of the log of an epoch: a cache
--   any other    facts, claims, places and refusals: quota/ledger/state.py
CREATE TABLE state (
    project TEXT NOT NULL,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- The entries that have left the log, for reports.
CREATE TABLE past (
    project TEXT    NOT NULL,
    ms      INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    line    TEXT    NOT NULL,
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;
