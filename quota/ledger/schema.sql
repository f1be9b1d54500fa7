-- The embedded ledger. One file serves many processes of one machine (WAL).
-- Times are milliseconds since 1970. An id is (ms, seq): the charge's time, then its number within that millisecond.
-- The rules (L1, L2, ...) are in ARCHITECTURE.md. PRAGMA user_version is the version of this format (L24).

-- L1. The log: every admitted charge, in the order of their ids.
CREATE TABLE charges (
    project       TEXT    NOT NULL,
    ms            INTEGER NOT NULL,
    seq           INTEGER NOT NULL,
    units         INTEGER NOT NULL,  -- what it counts now, after corrections (L15)
    charged_units INTEGER NOT NULL,  -- what it counted when it was made
    bucket        TEXT    NOT NULL,
    method        TEXT    NOT NULL,
    job           TEXT    NOT NULL,
    region        TEXT    NOT NULL,
    idempotency_key TEXT  NOT NULL,  -- unique to the attempt
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;

-- L3. The running total of one limit: the sum over the selected charges with tail <= id <= head.
CREATE TABLE views (
    project  TEXT    NOT NULL,
    name     TEXT    NOT NULL,       -- L2: what it counts, and its window: BUCKETS|METHODS|JOBS|WINDOW
    total    INTEGER NOT NULL,
    tail_ms  INTEGER NOT NULL,       -- nothing before this is counted
    tail_seq INTEGER NOT NULL,
    head_ms  INTEGER NOT NULL,       -- everything up to this has been read
    head_seq INTEGER NOT NULL,
    dropped_through_ms INTEGER NOT NULL,  -- the newest millisecond whose charges may have been dropped
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- L20. Buckets that upstream called empty. A bucket that somebody reopened keeps its row and the reason, and is open.
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

-- L19. The last number that each machine has repaid from its journal, and when.
CREATE TABLE repaid (
    project TEXT    NOT NULL,
    machine TEXT    NOT NULL,
    number  INTEGER NOT NULL,
    at_ms   INTEGER NOT NULL,        -- 0: not known
    PRIMARY KEY (project, machine)
) WITHOUT ROWID;

-- L25. Whose the regions of a job are, and which ticks were run: a JSON text, described in claims.py.
CREATE TABLE claims (
    project  TEXT    NOT NULL,
    name     TEXT    NOT NULL,       -- the job's
    until_ms INTEGER NOT NULL,       -- when the last of it lapses
    record   TEXT    NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;

-- One row a project, read by every decision.
CREATE TABLE projects (
    project            TEXT    PRIMARY KEY,
    epoch              TEXT    NOT NULL,  -- L18: names this ledger since its first charge, or its last reported loss. Of a
                                          -- fenced ledger (L27): !, then where it has moved (!> until it is sealed); !<, then
                                          -- where it is filled from
    unlogged_until_ms  INTEGER NOT NULL,  -- until when any unlogged usage counts
    retention_ms       INTEGER NOT NULL,  -- L12: how long charges are kept: the longest that any writer named
    trimmed_through_ms INTEGER NOT NULL,  -- L13: charges up to this time may have been trimmed
    granted            TEXT    NOT NULL DEFAULT '', -- L28: what upstream says it grants: BUCKET=UNITS:SINCE_MS:UNTIL_MS;...
    compared           TEXT    NOT NULL DEFAULT ''  -- what upstream counted when somebody compared last: compared.py
) WITHOUT ROWID;

-- L26. What a repair has left, for machines that saw entries under other ids before it.
CREATE TABLE repairs (
    project     TEXT    NOT NULL,
    newest_ms   INTEGER NOT NULL,    -- the newest entry's id until then
    newest_seq  INTEGER NOT NULL,
    begun_ms    INTEGER NOT NULL,    -- entries dated ahead of this were given an id from then on
    at_ms       INTEGER NOT NULL,    -- when all of them had one; later than that of the repair before
    through_ms  INTEGER NOT NULL,    -- the newest entry's id then
    through_seq INTEGER NOT NULL,
    PRIMARY KEY (project, at_ms)
) WITHOUT ROWID;

-- L17. Usage that counts though the log lacks it: lost with an earlier epoch, and reported by a machine that saw it. Each
-- part is added to the view until it would have expired.
CREATE TABLE unlogged (
    project  TEXT    NOT NULL,
    view     TEXT    NOT NULL,
    epoch    TEXT    NOT NULL,       -- the one that was lost
    expiries TEXT    NOT NULL,       -- UNITS:UNTIL_MS,UNITS:UNTIL_MS
    until_ms INTEGER NOT NULL,       -- the latest of these
    last_ms  INTEGER NOT NULL,       -- the newest entry that its reporter had seen
    last_seq INTEGER NOT NULL,
    kept_units    INTEGER NOT NULL,  -- so many units were in the log and in the window when it was reported,
    kept_since_ms INTEGER NOT NULL,  -- of what came after this
    kept_last_ms  INTEGER NOT NULL,  -- and until this
    logged_units  INTEGER NOT NULL,  -- so many units that its reporter had seen are not in it,
    since_ms      INTEGER NOT NULL,  -- of what came after this
    PRIMARY KEY (project, view, epoch)
) WITHOUT ROWID;

-- L27. Projects that a move has touched.
CREATE TABLE moves (
    project    TEXT    PRIMARY KEY,
    role       TEXT    NOT NULL,  -- fenced, sealed, filling, or open
    move       TEXT    NOT NULL,  -- the name of the last move
    epoch      TEXT    NOT NULL,  -- of a fenced ledger: its epoch without the fence
    filled_ms  INTEGER,           -- the id up to which it is filled; NULL until it is cleared
    filled_seq INTEGER
) WITHOUT ROWID;

-- L29. The history: one row a project, for what was rolled up so far.
CREATE TABLE histories (
    project        TEXT    PRIMARY KEY,
    rolled_ms      INTEGER NOT NULL,  -- the id of the newest charge that the history has
    rolled_seq     INTEGER NOT NULL,
    whole_after_ms INTEGER NOT NULL,  -- it has every charge that is newer than this, but for the gap:
    gap_from_ms    INTEGER NOT NULL,  -- after this and up to the next, charges may be missing (0 and 0: none)
    gap_to_ms      INTEGER NOT NULL,
    summed_after_ms  INTEGER NOT NULL,  -- charges up to this id were in the sums of a history that was lost
    summed_after_seq INTEGER NOT NULL
) WITHOUT ROWID;

-- L29. What was charged in an hour.
CREATE TABLE hours (
    project TEXT    NOT NULL,
    hour_ms INTEGER NOT NULL,         -- its beginning
    method  TEXT    NOT NULL,
    job     TEXT    NOT NULL,
    region  TEXT    NOT NULL,
    bucket  TEXT    NOT NULL,
    charges INTEGER NOT NULL,
    units   INTEGER NOT NULL,         -- after corrections
    PRIMARY KEY (project, hour_ms, method, job, region, bucket)
) WITHOUT ROWID;

-- L29. All that was charged since the history began. None of the numbers is ever lowered.
CREATE TABLE sums (
    project TEXT    NOT NULL,
    method  TEXT    NOT NULL,
    job     TEXT    NOT NULL,
    charges INTEGER NOT NULL,
    units   INTEGER NOT NULL,         -- as they were charged
    corrected_units INTEGER NOT NULL, -- by which corrections changed them, up or down
    PRIMARY KEY (project, method, job)
) WITHOUT ROWID;

-- L30. How many calls were refused in an hour.
CREATE TABLE refused (
    project    TEXT    NOT NULL,
    hour_ms    INTEGER NOT NULL,
    refused_by TEXT    NOT NULL,      -- a limit, or the bucket that upstream closed
    job        TEXT    NOT NULL,
    reason     TEXT    NOT NULL,
    calls      INTEGER NOT NULL,
    PRIMARY KEY (project, hour_ms, refused_by, job, reason)
) WITHOUT ROWID;

-- L30. All that was refused since the history began. No number is ever lowered.
CREATE TABLE refused_sums (
    project    TEXT    NOT NULL,
    refused_by TEXT    NOT NULL,
    job        TEXT    NOT NULL,
    reason     TEXT    NOT NULL,
    calls      INTEGER NOT NULL,
    PRIMARY KEY (project, refused_by, job, reason)
) WITHOUT ROWID;

-- L30. The newest refusals as a whole.
CREATE TABLE refusals (
    project TEXT    NOT NULL,
    number  INTEGER NOT NULL,
    refusal TEXT    NOT NULL,         -- the decision as JSON
    PRIMARY KEY (project, number)
) WITHOUT ROWID;
