"""Keeps whole files of registries by their content: fetches, checks and serves the bytes; decides nothing else."""
