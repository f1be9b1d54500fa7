"""The dashboard: reads the ledger, and serves its state as an HTML page for operators.

app.py         the ASGI application: the parts of a session, and the routes
reading.py     reads the ledger, and keeps each part while it is read again
pages.py       the pages: turns the parts into values for the templates
charts.py      the use of a limit over time, as numbers and as shapes
words.py       times and verdicts in words
contract.py    the parts that other packages add to the page
"""
