"""Base tables: plain tables with the rows that the source's tables held at one LSN, refreshed from the log."""
