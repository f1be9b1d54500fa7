"""The built-in fetch functions: each makes one call for one region."""
