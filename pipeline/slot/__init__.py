"""The edge of psycopg: everything that is said to the PostgreSQL server, and nothing about what it sends.

``settings`` (what to read) → ``options`` (what may be asked of this server) → ``connection`` (the stream);
``admin`` (slots: describe, create, drop), ``preflight`` (every precondition, with its remedy), ``conninfo``
and ``failures`` (the server's reports as ``pipeline.errors``). No message is parsed here.
"""
