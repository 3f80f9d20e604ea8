"""Open transactions in memory: what a buffer holds, what it spills, what it hands over at the end."""
