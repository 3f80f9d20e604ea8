"""The bodies of the actors in plain Python, without Ray: what a buffer does, the commit sequencer, the way of a cut."""
