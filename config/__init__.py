"""Data: cost books, and the commented example configuration."""
