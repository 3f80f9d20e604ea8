"""The bodies of the actors: what a buffer and the commit sequencer do, in plain Python, without Ray."""
