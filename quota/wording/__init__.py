"""What people are told, in words and tables, wherever they read it: a terminal, or the page."""
