"""Decides what runs: catalog, placement, reconciling, commands, API and ctl."""
