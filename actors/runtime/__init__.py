"""Shared by all processes of a run: Ray, Java, the nodes, signals, secrets and memory."""
