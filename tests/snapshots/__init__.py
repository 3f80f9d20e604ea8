"""Snapshots under a hostile workload, with kills: the log's fold equals a twin slot's at any LSN. See ``__main__``."""
