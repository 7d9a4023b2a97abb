"""How the cards of a node are found and read; what is given of them is decided in nodeagent/domain."""
