"""What clients of every kind get from a gateway: one table of requests, and a client of each kind to make them.

`make transcript` runs all of them against one yard and writes docs/transcript.md; tests/system/test_clients.py
runs those that need no browser.
"""
