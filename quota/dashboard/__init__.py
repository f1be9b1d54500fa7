"""The page for operators: `quota dashboard`. Reads the ledger, and serves what it read as HTML.

app.py         the ASGI application: what is read of a session, and the routes
reading.py     what is read of the ledger, and kept while it is read again
pages.py       the pages: what was read, for the templates
charts.py      the use of a limit over time, as numbers and as shapes
words.py       times and verdicts in words
contract.py    what other packages add to the page
"""
