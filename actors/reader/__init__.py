"""The inside of the slot reader actor: its loop, its buffers, and the thread that sends them their blocks."""
