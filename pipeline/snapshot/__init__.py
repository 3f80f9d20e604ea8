"""What a snapshot of a table is: the transactions that it contains, what ends it, and how far states are proven.

How snapshots are taken is in ``initial_copy``.
"""
