"""Small helpers that do not depend on budgets: clock, text, log, files."""
