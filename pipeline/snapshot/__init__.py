"""The rows that a table had before its stream: what a snapshot contains, how it is read, and what is done next.

Plain values and decisions: no server, no file, no actor. ``pipeline.slot`` takes snapshots, ``pipeline.stages`` reads
their rows, ``pipeline.spark`` commits them, ``pipeline.segments`` records what was decided, and ``actors.snapshot``
runs all of that.
"""
