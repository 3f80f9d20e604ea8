"""pgoutput for tests: the messages of rows as values, their parser, and a writer of all messages."""
