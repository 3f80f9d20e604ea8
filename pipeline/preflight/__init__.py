"""All that can be known of a run before anything is started: server, storage, the slot's record and the sink."""
