"""A hub of models for tests and the demo: the Hub's HTTP API as huggingface_hub uses it, with faults on demand.

    python -m tests.hub --port 0 --file model.gguf --rate 20MiB

Standard library and msgspec only, so that the demo needs nothing that only tests need.
"""
