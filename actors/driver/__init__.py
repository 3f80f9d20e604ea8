"""The inside of the Spark driver: the session, the batch loop, and the watch over RayDP's processes."""
