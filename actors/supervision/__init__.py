"""Keeps a run going: one supervisor for each slot, its epochs, and its handle on the Spark driver."""
