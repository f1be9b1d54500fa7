"""Small helpers that know nothing of budgets: clock, text, log, files."""
