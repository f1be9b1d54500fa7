"""The configuration and the cost books: TOML in, typed values out, read strictly and judged.

toml          one table of a file, what its keys may hold, and every error as one line
references    what the configuration refers to: secrets, files, servers
tables        every table of the configuration and of a cost book, by these kinds
model         the typed values: settings, credentials, jobs, the store; and the folder for the state of one machine
load          finds the file, and makes the values of it
environment   the same keys from variables `QUOTA__...`
books         cost books, and the limits of a credential, read by these tables
schedules     when a job runs
lint          finds valid but unwise settings, also in a cost book: `quota check`
origins       every value in force, and its origin: `quota check --show`
"""
