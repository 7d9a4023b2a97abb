"""Read models of the log in sqlite: caches that may be deleted at any time."""
