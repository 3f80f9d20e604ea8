"""Erasure: a key's rows out of the change log, the base tables and the storage, while the stream goes on."""
