-- The embedded ledger. One file serves many processes of one machine (WAL).
-- Times are milliseconds since 1970. An id is (ms, seq): the charge's time, then its number within that millisecond.
-- The rules (L1, L2, ...) are in docs/ledger-rules.md. PRAGMA user_version is the version of this format (L24).

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
    settled       INTEGER NOT NULL,  -- 1 after a correction, also to the same number (L15)
    PRIMARY KEY (project, ms, seq)
) WITHOUT ROWID;

-- All else that a project's ledger has, as named fields: the same texts that Redis has in its hashes, and the form in
-- which a state moves between any two ledgers. Those that follow from others, or that Redis needs for itself, are not here.
--
--   epoch               L18: names this ledger since its first charge, or its last reported loss. Of a fenced ledger (L27):
--                       !, then where it has moved (!> until it is sealed); !<, then where it is filled from
--   retention_ms        L12: how long charges are kept: the longest that any writer named
--   trimmed_through_ms  L13: charges up to this time may have been trimmed
--   view:NAME           L3: TOTAL TAIL HEAD DROPPED_THROUGH_MS. The name says what it counts (L2)
--   unlogged_until_ms   L17: until when any unlogged usage counts
--   unlogged:VIEW       L17: usage that counts though the log lacks it: EPOCH EXPIRIES KEPT LAST, for each lost epoch
--   closed:BUCKET       L20: UNTIL_MS SINCE_MS JSON. Upstream called the bucket empty
--   reopened:BUCKET     L20: REOPENED_MS JSON, and on the next line what stood in closed:BUCKET
--   repaid:MACHINE      L19: the last number that it has repaid from its journal
--   repaid_at:MACHINE   L19: and when
--   granted             L28: what upstream says it grants: BUCKET=UNITS:SINCE_MS:UNTIL_MS;...
--   compared            L28: what upstream counted when somebody compared last: compared.py
--   claim:NAME          L25: UNTIL_MS JSON. Whose the regions of a job are, and which ticks were run: claims.py
--   place:NAME|REGION   L31: UNTIL_MS TEXT. Where a job stands in a region, as whoever runs it says
--   repaired            L26: what repairs have left, newest first: NEWEST BEGUN_MS AT_MS THROUGH, a line for each
--   history:...         L29, L30: as lua/roll_up.lua and lua/add_refusals.lua say; history:refusals is a JSON list
--   fence, move,        L27: the role in the last move that touched this ledger, and the name of that move; of a fenced
--   fenced_epoch,       ledger its epoch without the fence; and the id up to which it is filled, once it is cleared
--   filled
CREATE TABLE state (
    project TEXT NOT NULL,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (project, name)
) WITHOUT ROWID;
