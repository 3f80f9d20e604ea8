"""The commit sequencer: strict commit order, the journal, and what may be recorded and confirmed."""
