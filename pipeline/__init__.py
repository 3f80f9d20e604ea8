"""What happens to the data between a replication slot and a Spark sink.

Nothing in this package imports ray or raydp: where things run is decided in ``actors``. The layers, each
importing only those below it (checked in CI by import-linter)::

    stages                                                            the bodies of the actors
    state                                                             tables as they were at a commit
    slot | decode | segments | spark | stream | buffer | sequencer    siblings, strangers to each other
    exchange                                                          all that crosses processes
    rows                                                              the Arrow layout of rows
    relations                                                         relation versions and their types
    protocol                                                          pgoutput messages
    config | restarts
    pg
    faultpoints
    errors
"""
