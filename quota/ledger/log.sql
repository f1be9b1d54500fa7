-- The embedded ledger: the logs of all projects of one machine. One file serves many processes (WAL).
-- quota/ledger/log.py says what a log does; here is where it lies. PRAGMA user_version is the version of this format.
--
-- Times are milliseconds since 1970. An id is (ms, seq): a time, then a number within that millisecond. A `line` is an
-- entry as quota/rules/entry.py packs it, without its id. A line that nobody can read counts nothing, and fails nobody.

-- What was charged, in order: the longest window ever named, and a long day.
CREATE TABLE log (
    project TEXT    NOT NULL,
    ms      INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    line    TEXT    NOT NULL,
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;

-- The newest correction of each charge of the log, by the charge's key: what the charge counts, and the correction's id.
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
--   epoch        names the log. ~TOKEN:END_MS is a fence, !URL a seal. A log without one, and an epoch whose log is
--                missing, are what is left of a log: nobody appends until it is put together anew
--   trimmed      MS-SEQ: what lies at or before it has left the log. Only with it a log that has an epoch may be empty
--   view:NAME    what was computed of the log of an epoch: a cache
--   any other    facts, claims, places and refusals: quota/ledger/state.py
CREATE TABLE state (
    project TEXT NOT NULL,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- What has left the log, for reports. A charge has the units that it counted last.
CREATE TABLE past (
    project TEXT    NOT NULL,
    ms      INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    line    TEXT    NOT NULL,
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;
