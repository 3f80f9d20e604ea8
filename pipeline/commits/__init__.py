"""Strict commit order: what may be released, what may be written to the journal, and what may be confirmed."""
