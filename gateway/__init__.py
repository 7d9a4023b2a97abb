"""Serves it: OpenAI endpoints, routing table, waiting room and the HTTP of the data path."""
