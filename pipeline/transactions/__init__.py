"""The xid buffer: open transactions in memory, what a rollback takes, what spills, what is handed over at the end."""
