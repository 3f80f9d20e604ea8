"""Takes the snapshots of tables beside the stream: the thread that leads, and the actors' handles."""
