-- The local store: what the jobs fetched, and where each of them stands. One SQLite file (WAL).
-- Times ending in _ms are milliseconds since the epoch; other times are upstream's own text.
-- Everything here is the provider's data, kept no longer than the retention allows: every table carries the time by
-- which its rows age.

-- One row per video: what upstream said at refreshed_ms. What that answer left out is null, also where an earlier one
-- had it: an owner may hide the likes, and an old count must not pass for a new one.
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
    title_words       TEXT,                   -- these four: the text as the search reads it, where that differs; see
    description_words TEXT,                   -- `videos_words`. Whoever else changes a text sets its words to null
    channel_words     TEXT,
    tags_words        TEXT,
    first_seen_ms    INTEGER NOT NULL,
    refreshed_ms     INTEGER NOT NULL
);
CREATE INDEX videos_by_age ON videos (refreshed_ms);
CREATE INDEX videos_by_channel ON videos (channel_id);

-- Rankings over time. taken_at_ms is the start of the region's round: all pages of one pass share it, also when they
-- were fetched by several runs. A chart may move between two pages; a video then keeps the first rank it was seen at.
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
    first_seen_ms    INTEGER NOT NULL,
    refreshed_ms     INTEGER NOT NULL
);
CREATE INDEX channels_by_age ON channels (refreshed_ms);

-- Where a job stands in each region. A round is one pass over the job's regions.
CREATE TABLE places (
    job             TEXT    NOT NULL,
    region          TEXT    NOT NULL,
    pending         INTEGER NOT NULL DEFAULT 0, -- 1: the round under way has not covered this region yet
    cursor          TEXT,                       -- JSON of what to fetch next; null: start with the first page
    pages           INTEGER NOT NULL DEFAULT 0, -- stored in this pass
    items           INTEGER NOT NULL DEFAULT 0, -- stored in this pass
    ranks           INTEGER NOT NULL DEFAULT 0, -- given in this pass: the next page goes on from here
    started_at_ms   INTEGER,                    -- of this pass; null: nothing of it is stored yet
    completed_at_ms INTEGER,                    -- of the last complete pass
    failed_at_ms    INTEGER,                    -- of the last pass that ended with an error
    PRIMARY KEY (job, region)
) WITHOUT ROWID;

-- Where the pass under way was already, as digests of its cursors: upstream that names a page again goes in circles.
CREATE TABLE cursors (
    job    TEXT NOT NULL,
    region TEXT NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (job, region, digest)
) WITHOUT ROWID;
CREATE TRIGGER cursors_of_a_pass_that_ended AFTER UPDATE OF cursor ON places WHEN new.cursor IS NULL BEGIN
    DELETE FROM cursors WHERE job = new.job AND region = new.region;
END;
CREATE TRIGGER cursors_of_no_place AFTER DELETE ON places BEGIN
    DELETE FROM cursors WHERE job = old.job AND region = old.region;
END;

-- The words of a video: its texts, with the words apart where a script writes none (`fulltext.py` writes them so).
CREATE VIEW videos_words AS
SELECT id,
    ifnull(title_words, title) AS title,
    ifnull(description_words, description) AS description,
    ifnull(channel_words, channel_title) AS channel_title,
    ifnull(tags_words, tags) AS tags
FROM videos;

-- The index over them. Accents do not matter: "cafe" finds "café". A mark that is no accent is part of its word (M*): the
-- vowels of Hindi and Thai are such marks. The text itself stays in `videos`; the triggers, which use nothing but SQL so
-- that any program may write, keep the index in step with it.
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
