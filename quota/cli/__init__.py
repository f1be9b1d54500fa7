"""The command line: `quota`. Each command opens a session, calls one public function and prints the result."""
