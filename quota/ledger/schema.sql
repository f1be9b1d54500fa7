-- The embedded ledger. One file serves many processes of one machine (WAL).
-- Times are milliseconds since 1970. An id is (ms, seq): the charge's time, then its place within that millisecond.

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

-- Buckets that upstream itself said are empty. One that was reopened since is kept with the reason, and closes nothing.
CREATE TABLE exhaustions (
    project     TEXT    NOT NULL,
    bucket      TEXT    NOT NULL,
    since_ms    INTEGER NOT NULL,
    until_ms    INTEGER NOT NULL,
    evidence    TEXT    NOT NULL,
    reported_by TEXT    NOT NULL,
    reopened_ms INTEGER NOT NULL,    -- 0: it stands
    reopened_because TEXT NOT NULL,
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

-- What every decision knows of a project beside its newest charge.
CREATE TABLE projects (
    project    TEXT    PRIMARY KEY,
    epoch      TEXT    NOT NULL,     -- names this ledger since its first charge, or since its last loss was made good
    carried_ms INTEGER NOT NULL,     -- until when any carry counts
    keep_ms    INTEGER NOT NULL,     -- how long charges are kept: the longest that any writer named
    trimmed_ms INTEGER NOT NULL      -- charges up to this time were let go of
) WITHOUT ROWID;

-- What was lost with an earlier epoch, as far as any machine remembers: added to the view, part by part, until it would
-- have expired.
CREATE TABLE losses (
    project  TEXT    NOT NULL,
    view     TEXT    NOT NULL,
    epoch    TEXT    NOT NULL,       -- the one that was lost
    parts    TEXT    NOT NULL,       -- UNITS:UNTIL_MS,UNITS:UNTIL_MS
    until_ms INTEGER NOT NULL,       -- the last part's
    last_ms  INTEGER NOT NULL,       -- the newest entry that its reporter had seen
    last_seq INTEGER NOT NULL,
    kept_units    INTEGER NOT NULL,  -- so much was still there when it was reported, or there again,
    kept_since_ms INTEGER NOT NULL,  -- of what came after this
    since_ms      INTEGER NOT NULL,  -- it holds what came after this
    PRIMARY KEY (project, view, epoch)
) WITHOUT ROWID;
