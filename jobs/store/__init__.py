"""The local store of fetched data and of each region's place: one SQLite file, see `schema.sql`.

store          the store for runs
reader         the search over videos, the store for the API, and exports of tables, read-only
file           the file: its path and its errors
checkpoints    where a job stands in its regions, and which region is next
rows           upstream's resources as rows, and rows of a job's own tables
runs           what runs did, and what their pages brought
fulltext       text for the full-text search
"""
