"""Storage: spilled rows, prepared transactions and the confirmed position, through ``pyarrow.fs`` alone.

Everything that outlives a process is here, and nothing else is stored anywhere::

    <system identifier>/<slot>/
        epochs/<epoch>/<xid>-<first LSN>/<number>.parquet   spilled rows of one transaction
        epochs/<epoch>/<xid>-<first LSN>/<number>.arrow     its logical messages
        prepared/<xid>-<prepare end LSN>.<epoch>.json       a prepared transaction
        journal/<number>.<epoch>.journal                    committed transactions that the sink does not hold yet
        progress/<owner>.<epoch>.json                       the confirmed LSN, by whom; what is finished up to it
        progress/<owner>.<epoch>.claim                      that an epoch takes the slot over; empty
        server.json                                         the server's timeline
        beginning.json                                      where the storage began with the slot

Invariants:

- An object is there whole or not at all, and never changes after that, but for two things. An owner's record of
  progress, ``server.json`` and ``beginning.json`` are replaced whole. Rows may be filled in at COMMIT
  (``pipeline.parquet``), which changes a few bytes once. What is read is compared with the length and checksum
  taken while it was written.
- What may be confirmed because of an object (a prepared transaction or a journal file with all it names, the
  position) is on disk, not only in a cache, when the call that wrote it returns. Segments of open transactions are
  not: the slot has them still.
- Every failure is a StorageFault that names the object; a damaged object is a SegmentCorrupt.
- Keys are made of numbers and of names that PostgreSQL and we restrict; a gid or a table's name is content.

Callers: buffers write, Spark's executors read, the sequencer keeps ``prepared`` and ``progress`` and deletes.
Considered and rejected: Arrow IPC for rows (a tenth of the CPU to write and three times the bytes; Spark wrote every
row again after COMMIT), one object per batch (object stores charge for requests), a database (one more thing to run,
and to lose).
"""
