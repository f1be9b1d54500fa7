"""When each tick of each job starts, and the process that starts them."""
