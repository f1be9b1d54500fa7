"""The command line: `quota`. Thin: each command opens a session, calls one public function, prints its result."""
