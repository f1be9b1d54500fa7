-- The embedded ledger. One file serves many processes of one machine (WAL).
-- Times are milliseconds since the epoch. An id is (ms, seq): the charge's time, then its place within that millisecond.

-- The log: every admitted charge, in time order.
CREATE TABLE charges (
    project       TEXT    NOT NULL,
    ms            INTEGER NOT NULL,
    seq           INTEGER NOT NULL,
    units         INTEGER NOT NULL,  -- what it counts now
    charged_units INTEGER NOT NULL,  -- what it counted when it was made
    bucket        TEXT    NOT NULL,
    method        TEXT    NOT NULL,
    job           TEXT    NOT NULL,
    region        TEXT    NOT NULL,
    token         TEXT    NOT NULL,
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;

-- The running total of one limit: the sum over the selected charges with tail <= id <= head.
CREATE TABLE views (
    project  TEXT    NOT NULL,
    name     TEXT    NOT NULL,       -- what it counts and its window: buckets|methods|jobs|window
    total    INTEGER NOT NULL,
    tail_ms  INTEGER NOT NULL,       -- nothing before this is counted
    tail_seq INTEGER NOT NULL,
    head_ms  INTEGER NOT NULL,       -- everything up to this has been seen
    head_seq INTEGER NOT NULL,
    gone_ms  INTEGER NOT NULL,       -- the newest millisecond whose charges may have been dropped
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- Buckets that upstream itself said are empty.
CREATE TABLE exhaustions (
    project     TEXT    NOT NULL,
    bucket      TEXT    NOT NULL,
    since_ms    INTEGER NOT NULL,
    until_ms    INTEGER NOT NULL,
    evidence    TEXT    NOT NULL,
    reported_by TEXT    NOT NULL,
    PRIMARY KEY (project, bucket)
) WITHOUT ROWID;

-- The last number that each machine's journal has repaid.
CREATE TABLE repaid (
    project TEXT    NOT NULL,
    machine TEXT    NOT NULL,
    number  INTEGER NOT NULL,
    PRIMARY KEY (project, machine)
) WITHOUT ROWID;

-- Work that one of several processes took on, by name, until others may take it again.
CREATE TABLE claims (
    project  TEXT    NOT NULL,
    name     TEXT    NOT NULL,
    until_ms INTEGER NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- How long a project's log is kept. Only grows.
CREATE TABLE keeping (
    project TEXT    PRIMARY KEY,
    keep_ms INTEGER NOT NULL
) WITHOUT ROWID;
