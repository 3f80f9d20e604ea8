"""What a run offers over HTTP: its status page, and its metrics."""
