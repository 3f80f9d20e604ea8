"""The rows that a table had before its stream: what a snapshot contains, how it is read, and what is done next.

Plain values and decisions: no server, no file, no actor. ``pipeline.postgres`` takes snapshots, ``pipeline.stages``
reads their rows, ``pipeline.spark`` commits them, ``pipeline.storage`` records what was decided, and
``actors.snapshots`` runs all of that.
"""
