"""The local store of what was fetched, and of where each region goes on: one SQLite file, see `schema.sql`.

store          the store, as runs use it
reader         the store, as the API reads it
file           the file: where it is, and what its errors say
checkpoints    where a job stands in its regions, and whose turn it is
rows           upstream's resources as rows; `tables` those of a job's own
runs           what runs did, and what their pages brought
fulltext       text as the search takes it, and `search` itself
export         what the store has, out of it again
expired        what it deletes
"""
