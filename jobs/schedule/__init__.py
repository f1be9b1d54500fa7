"""When each tick of each job starts (`ticks`), and the process that starts them (`scheduler`)."""
