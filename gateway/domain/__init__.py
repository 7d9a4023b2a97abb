"""The gateway's decisions: pure functions on frozen structs, time and ids as arguments."""
