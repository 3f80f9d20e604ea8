"""The edge of psycopg: everything that we say to the PostgreSQL server. No message of the stream is parsed here.

- ``sessions`` opens every session, with the settings that it must have. ``login`` says how it gets in, and
  ``password_command`` runs the program that gives a password.
- ``settings`` says what to read, ``stream_options`` what this server can be asked for, and ``opening`` opens the slot.
- ``connection`` is the stream. ``copy_loop`` reads its rows, and ``loopback`` fits its socket.
- ``admin`` describes, creates and drops slots.
- ``preflight`` checks every precondition, with its remedy. ``published`` and ``findings`` are parts of it.
- ``conninfo`` reads the DSN, and ``failures`` turns the server's reports into ``pipeline.errors``.
"""
