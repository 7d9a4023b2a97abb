"""Reads adapters where they come from: a repository, a URL, a folder. What they say is judged elsewhere."""
