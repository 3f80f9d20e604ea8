"""The data's way between a replication slot and a Spark sink.

Nothing in this package imports ray or raydp: where things run is decided in ``actors``. A room is a thing of the field,
and holds its state, what it decides, and its body. The rooms make one stair: each imports only from those below it. The
stair is written in pyproject.toml, import-linter checks it in CI, and a test holds this list against it::

    verify | erasure
        verify      the source's rows against the change log, at one moment
        erasure     a key's rows out of the log, the base tables and the storage
    mirror          base tables, refreshed from the change log
    commits         the commit sequencer: commit order, the journal, what may be confirmed
    preflight       all that can be known of a run before anything is started
    initial_copy    snapshots of tables: what is next for each, the reading, the records
    transactions    the xid buffer: open transactions in memory, what is rolled back, what spills
    sinks           what a sink is; the sinks of Delta and Iceberg, a function, the console
    changelog       tables as they were at a commit, read from the change log
    spark           batches as DataFrames, and the tasks of Spark's executors
    delta | iceberg
        delta       Delta tables: columns, files, commits; without pyspark
        iceberg     Iceberg tables: catalogs, columns, commits; without pyspark
    log_tables      what tables of a change log have in common: locations, columns, files, owners
    decode | postgres | storage | stream
        decode      blocks to Arrow, in compiled kernels
        postgres    the replication connection, and all that is asked of the server
        storage     the storage: segments, prepared transactions, the journal's files, the record
        stream      the slot's stream, cut into blocks by transaction, and where each event goes
    packs           small parts of many tables in one object
    exchange        the values that cross processes
    parquet         the Parquet file of a transaction's rows, filled in at COMMIT
    snapshot        what a table's snapshot contains, what ends it, how far states are proven
    schema          relation versions, their types, and the Arrow layout of rows
    pgoutput        the messages of pgoutput
    account         what may be known of a run, and which part waits for what
    settings        what a person may set: a run's settings, and the values they are made of
    parked | poison | restarts
        parked      tables that are set aside
        poison      changes that cannot be delivered
        restarts    when a failed run begins again
    pg              Lsn, Xid
    pg_rules        what PostgreSQL allows in names and values
    spark_errors    errors of Spark and Delta, as ours
    faultpoints     places where tests can make a process crash, fail or wait
    events | findings
        events      what a run tells people, with what programs want of it
        findings    the result of one check of the preflight
    errors          error classes, each with a policy and a remedy
    quantities      counts, bytes and times, written for people
"""
