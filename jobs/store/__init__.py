"""The local store of what was fetched, and of where each region goes on."""
