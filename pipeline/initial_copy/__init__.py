"""Snapshots of tables: what is done next for each, the reading of their ranges, and what is recorded."""
