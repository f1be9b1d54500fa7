"""The provider's own count beside ours: read it, compare, and count what only upstream knows of."""
