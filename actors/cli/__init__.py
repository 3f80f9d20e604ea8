"""The command line: options, checks, the live display, and the commands themselves."""
