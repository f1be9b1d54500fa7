"""When each tick of each job starts (`ticks`), the process that starts them (`scheduler`), and
their lines for cron (`crontab`)."""
