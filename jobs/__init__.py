"""The application: regional fetch jobs, their schedule and store, and an emulator of the upstream."""
