"""pgoutput: its messages as values, their legal order, and where their bytes are gathered.

    messages        one frozen dataclass per message that Python looks at, fields in wire order
    parser          bytes -> messages; any bytes give a message or MalformedMessage
    cursor          the parser's checked walk through a message
    grammar         which message may come where, as a table
    message_buffer  messages one after the other in an array, as Python and a compiled loop append them
    relids          which relations the rows of a block belong to
    spares          arrays that are used again

Parsing knows nothing of order and the grammar nothing of bytes: the two ways in which a server can break
protocol (MalformedMessage, IllegalTransition) are found by different code, and each is tested alone. Nothing
here reads a socket or knows what a relation means. Rows do not become messages: ``pipeline.decode`` decodes them in
whole blocks. The tests have a parser of rows and a writer of all messages (``tests/pgoutput``).

Protocol 1 is PostgreSQL 10's, 2 adds streams (14), 3 two-phase (15), 4 the LSN and time of parallel stream
aborts (16). The layouts of a version are kept by the later ones, so the version itself is no parameter: only
being inside a stream block, and ``streaming=parallel``, change how a message is read.
"""
