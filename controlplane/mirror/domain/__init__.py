"""The mirror's decisions on values: ranges, pace, retries, what an answer or a byte means. No I/O, no clock."""
