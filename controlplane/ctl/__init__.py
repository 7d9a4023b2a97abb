"""yardctl: a client of the yard. It imports schemas and events, nothing of the server."""
