"""The dashboard: reads the ledger, and serves its state as an HTML page for operators.

app.py         the ASGI application: the parts of a session, and the routes
pages.py       the pages: turns the parts into words and values for the templates
reading.py     reads the ledger, and keeps each part while it is read again
charts.py      the use of a limit over time, as numbers and as shapes

`quota.reports.runs` has the parts that other packages add to the page.
"""
