"""Asks a registry of models what a repository holds and reads parts of its files; it keeps nothing."""
