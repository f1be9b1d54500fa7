-- The local store: fetched data, and a checkpoint for each region. One SQLite file (WAL).
-- Times ending in _ms are milliseconds since 1970; other times are upstream's own text.
-- The data is the provider's, and `retention` limits how long the store keeps it: every table has the time by which its
-- rows expire.

-- One row per video: upstream's answer at refreshed_ms. A column is null if that answer left it out, even if an earlier
-- answer had it: an owner may hide the likes, and an old count must not look new.
CREATE TABLE videos (
    id               INTEGER PRIMARY KEY,     -- the full-text index refers to this
    video_id         TEXT    NOT NULL UNIQUE, -- upstream's own
    title            TEXT,                    -- byte for byte
    description      TEXT,
    channel_id       TEXT,
    channel_title    TEXT,
    category_id      TEXT,
    published_at     TEXT,
    tags             TEXT,                    -- JSON array
    default_language TEXT,
    audio_language   TEXT,
    live_broadcast   TEXT,                    -- none, live or upcoming
    thumbnail_url    TEXT,
    view_count       INTEGER,
    like_count       INTEGER,
    comment_count    INTEGER,
    duration         TEXT,                    -- ISO 8601, as in PT4M13S
    definition       TEXT,                    -- hd or sd
    has_caption      INTEGER,                 -- 0 or 1
    is_licensed      INTEGER,                 -- 0 or 1
    title_words       TEXT,                   -- these four: the text as the search reads it, if that differs; see
    description_words TEXT,                   -- `videos_words`. A program that changes a text must set its words null
    channel_words     TEXT,
    tags_words        TEXT,
    first_seen_ms    INTEGER NOT NULL,
    refreshed_ms     INTEGER NOT NULL,
    listed_ms        INTEGER,                 -- when a chart, a search or another list last had it. A video expires
                                              -- by the older of refreshed_ms and listed_ms
    asked_ms         INTEGER                  -- when upstream was last asked for it, whether it answered or not
);
CREATE INDEX videos_by_age ON videos (refreshed_ms);
CREATE INDEX videos_by_list ON videos (listed_ms);
CREATE INDEX videos_by_asking ON videos (asked_ms);
CREATE INDEX videos_by_channel ON videos (channel_id);

-- Rankings over time. taken_at_ms is when the region's pass started: all its pages share it, even if several runs
-- fetched them. A chart may change between two pages; a video then keeps the first rank at which it appeared.
CREATE TABLE rankings (
    job         TEXT    NOT NULL,
    region      TEXT    NOT NULL,
    taken_at_ms INTEGER NOT NULL,
    rank        INTEGER NOT NULL,             -- 1 is the top
    video_id    TEXT    NOT NULL,
    view_count  INTEGER,                      -- at that time
    PRIMARY KEY (job, region, taken_at_ms, rank)
) WITHOUT ROWID;
CREATE UNIQUE INDEX rankings_by_video ON rankings (video_id, job, region, taken_at_ms);
CREATE INDEX rankings_by_region ON rankings (region, taken_at_ms);
CREATE INDEX rankings_by_age ON rankings (taken_at_ms);

CREATE TABLE channels (
    channel_id       TEXT    PRIMARY KEY,
    title            TEXT,
    description      TEXT,
    custom_url       TEXT,
    country          TEXT,
    published_at     TEXT,
    thumbnail_url    TEXT,
    view_count       INTEGER,
    subscriber_count INTEGER,                 -- null where the owner hides it
    video_count      INTEGER,
    uploads_id       TEXT,                    -- the playlist of what it has published
    first_seen_ms    INTEGER NOT NULL,
    refreshed_ms     INTEGER NOT NULL
);
CREATE INDEX channels_by_age ON channels (refreshed_ms);

-- Rows of tables that jobs name themselves (`rows.py`). `quota tables --views` makes a view of each.
CREATE TABLE rows (
    id            INTEGER PRIMARY KEY,
    name          TEXT    NOT NULL,           -- of the table
    key           TEXT    NOT NULL,           -- of the row; if several fields are the key: a JSON array
    key_fields    TEXT    NOT NULL,           -- their names
    job           TEXT    NOT NULL,           -- that fetched it last
    region        TEXT    NOT NULL,
    data          TEXT    NOT NULL,           -- JSON: the row as it came
    first_seen_ms INTEGER NOT NULL,
    refreshed_ms  INTEGER NOT NULL,
    UNIQUE (name, key)
);
CREATE INDEX rows_by_age ON rows (refreshed_ms);

-- Values that change over time, of videos and of tables with a history: each reading that differs from the last.
CREATE TABLE history (
    name         TEXT    NOT NULL,            -- videos, or the name of a table of rows
    key          TEXT    NOT NULL,            -- the video_id, or the row's key
    taken_at_ms  INTEGER NOT NULL,
    data         TEXT    NOT NULL,            -- JSON: the fields that are kept
    refreshed_ms INTEGER NOT NULL,            -- of the last answer with these values
    PRIMARY KEY (name, key, taken_at_ms)
) WITHOUT ROWID;
CREATE INDEX history_by_age ON history (refreshed_ms);

-- What the pages of each job brought, by page number and UTC day.
CREATE TABLE bought (
    day_ms INTEGER NOT NULL,
    job    TEXT    NOT NULL,
    page   INTEGER NOT NULL,                  -- 1 is the first; 100 also counts all later pages
    pages  INTEGER NOT NULL,
    items  INTEGER NOT NULL,
    new    INTEGER NOT NULL,                  -- the items that the store did not have
    units  INTEGER NOT NULL,                  -- of all attempts
    PRIMARY KEY (day_ms, job, page)
) WITHOUT ROWID;

-- The store's own id: the ledger notes it as the owner of a job's regions. A copy of the file has the same id.
CREATE TABLE store (
    id         TEXT    NOT NULL,
    time_ms    INTEGER,                       -- of the last run whose clock was believed: data expires by this time
    doubted_ms INTEGER                        -- since when runs have had a time days after time_ms; null: never
);
INSERT INTO store (id) VALUES (lower(hex(randomblob(16))));

-- The runs of each job here, and the other machine that ran the job when this machine last asked.
CREATE TABLE runs (
    job         TEXT    NOT NULL,
    work        TEXT    NOT NULL,               -- as in checkpoints
    first_ms    INTEGER NOT NULL,               -- of the first run
    started_ms  INTEGER NOT NULL,               -- of the last run
    gap_ms      INTEGER,                        -- from the run before until then
    runs_on     TEXT,                           -- the host where the job ran instead; null: it ran here
    heard_ms    INTEGER,                        -- when the ledger had last heard of it there
    until_ms    INTEGER,                        -- when another machine takes over, if that one is silent
    PRIMARY KEY (job, work)
) WITHOUT ROWID;

-- Each run: a row when it begins, completed when it ends. `runs.py` writes and reads it.
CREATE TABLE past_runs (
    id          INTEGER PRIMARY KEY,
    run         TEXT    NOT NULL,               -- the first 8 characters of the idempotency keys of its charges
    project     TEXT    NOT NULL,
    job         TEXT    NOT NULL,
    outcome     TEXT    NOT NULL,               -- done, stopped, failed, elsewhere, overlap; unfinished: it runs, or was killed
    why         TEXT    NOT NULL DEFAULT '',
    refused_by  TEXT,                           -- the limit that ended it
    retry_at_ms INTEGER,
    units       INTEGER NOT NULL DEFAULT 0,
    attempts    INTEGER NOT NULL DEFAULT 0,
    exit_status INTEGER,
    began_at_ms INTEGER NOT NULL,
    ended_at_ms INTEGER,
    regions     TEXT,                           -- JSON: how each region ended
    refusal     TEXT                            -- JSON: the decision that ended it
);
CREATE INDEX past_runs_by_time ON past_runs (began_at_ms);

-- Where a job stands in each region. A round is one pass over each of the job's regions.
CREATE TABLE checkpoints (
    job             TEXT    NOT NULL,
    work            TEXT    NOT NULL,           -- project, fetch function, options: jobs of one name may do different work
    region          TEXT    NOT NULL,
    pending         INTEGER NOT NULL DEFAULT 0, -- 1: the current round has not covered this region yet
    cursor          TEXT,                       -- JSON: where the next page begins; null: at the first page
    pages           INTEGER NOT NULL DEFAULT 0, -- stored in this pass
    items           INTEGER NOT NULL DEFAULT 0, -- stored in this pass
    ranks           INTEGER NOT NULL DEFAULT 0, -- given in this pass: the next page continues from here
    started_at_ms   INTEGER,                    -- of this pass; null: nothing is stored yet
    completed_at_ms INTEGER,                    -- of the last complete pass
    failed_at_ms    INTEGER,                    -- of the last pass that ended with an error
    PRIMARY KEY (job, work, region)
) WITHOUT ROWID;

-- The newest complete ranking of each job and region. An incomplete ranking, or a ranking that a wrong clock dated ahead,
-- may have a later taken_at_ms.
CREATE TABLE charts (
    job             TEXT    NOT NULL,
    region          TEXT    NOT NULL,
    taken_at_ms     INTEGER NOT NULL,
    completed_at_ms INTEGER NOT NULL,
    PRIMARY KEY (job, region)
) WITHOUT ROWID;
CREATE TRIGGER charts_of_a_pass_that_ended AFTER UPDATE OF completed_at_ms ON checkpoints
WHEN old.pending AND NOT new.pending AND EXISTS ( -- another machine may have begun the pass, and have its first ranks
    SELECT 1 FROM rankings r WHERE r.job = new.job AND r.region = new.region AND r.taken_at_ms = new.started_at_ms
        AND r.rank = 1) BEGIN
    INSERT OR REPLACE INTO charts VALUES (new.job, new.region, new.started_at_ms, new.completed_at_ms);
END;

-- Digests of the current pass's cursors: if upstream repeats a cursor, its pages form a circle.
CREATE TABLE cursors (
    job    TEXT NOT NULL,
    work   TEXT NOT NULL,
    region TEXT NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (job, work, region, digest)
) WITHOUT ROWID;
CREATE TRIGGER cursors_of_a_pass_that_ended AFTER UPDATE OF cursor ON checkpoints WHEN new.cursor IS NULL BEGIN
    DELETE FROM cursors WHERE job = new.job AND work = new.work AND region = new.region;
END;
CREATE TRIGGER cursors_without_a_checkpoint AFTER DELETE ON checkpoints BEGIN
    DELETE FROM cursors WHERE job = old.job AND work = old.work AND region = old.region;
END;

-- The words of a video: its texts, with spaces between the words of scripts that have none (`fulltext.py` adds them).
CREATE VIEW videos_words AS
SELECT id,
    ifnull(title_words, title) AS title,
    ifnull(description_words, description) AS description,
    ifnull(channel_words, channel_title) AS channel_title,
    ifnull(tags_words, tags) AS tags
FROM videos;

-- The index over them. Accents do not matter: "cafe" finds "café". Other marks belong to their word (M*), such as the
-- vowels of Hindi and Thai. The text itself stays in `videos`. The triggers keep the index up to date; they are plain
-- SQL, so that any program may write to `videos`.
CREATE VIRTUAL TABLE videos_text USING fts5 (
    title, description, channel_title, tags,
    content = 'videos_words', content_rowid = 'id',
    tokenize = "unicode61 remove_diacritics 2 categories 'L* M* N* Co'"
);
CREATE TRIGGER videos_text_insert AFTER INSERT ON videos BEGIN
    INSERT INTO videos_text (rowid, title, description, channel_title, tags)
    SELECT * FROM videos_words WHERE id = new.id;
END;
CREATE TRIGGER videos_text_delete AFTER DELETE ON videos BEGIN
    INSERT INTO videos_text (videos_text, rowid, title, description, channel_title, tags)
    VALUES ('delete', old.id, ifnull(old.title_words, old.title), ifnull(old.description_words, old.description),
        ifnull(old.channel_words, old.channel_title), ifnull(old.tags_words, old.tags));
END;
CREATE TRIGGER videos_text_update AFTER UPDATE OF
    title, description, channel_title, tags, title_words, description_words, channel_words, tags_words ON videos
WHEN (new.title, new.description, new.channel_title, new.tags,
        new.title_words, new.description_words, new.channel_words, new.tags_words)
    IS NOT (old.title, old.description, old.channel_title, old.tags,
        old.title_words, old.description_words, old.channel_words, old.tags_words)
BEGIN
    INSERT INTO videos_text (videos_text, rowid, title, description, channel_title, tags)
    VALUES ('delete', old.id, ifnull(old.title_words, old.title), ifnull(old.description_words, old.description),
        ifnull(old.channel_words, old.channel_title), ifnull(old.tags_words, old.tags));
    INSERT INTO videos_text (rowid, title, description, channel_title, tags)
    SELECT * FROM videos_words WHERE id = new.id;
END;
