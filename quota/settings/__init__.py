"""The configuration: its typed values, reading it strictly, judging it, cost books and schedules from TOML."""
