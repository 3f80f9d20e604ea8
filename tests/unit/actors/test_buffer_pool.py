"""What the reader keeps of an open transaction beside its blocks."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from xidstream.actors.reader.buffer_pool import _Open
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion, ReplicaIdentity
from xidstream.pipeline.stream import Block, TransactionBlock, UsedRelations
from xidstream.pipeline.transactions.buffer_calls import BufferedTransaction


def test_of_the_relations_of_an_open_transaction_the_names_are_kept_and_no_version() -> None:
    """One of ten thousand tables kept the columns of all, for as long as it was open."""
    opened = _Open(BufferedTransaction(Xid(700), 0, 0, 0))
    versions = [RelationVersion(i, "public", f"t{i % 2}", ReplicaIdentity.DEFAULT, ()) for i in range(4)]
    kept = [weakref.ref(version) for version in versions]
    for number, version in enumerate(versions):
        block = Block(np.zeros(1, np.uint8), np.ones(1, np.int32), UsedRelations({number: version}))
        opened.note(TransactionBlock(Xid(700), block, True, Lsn(1)))
    del versions, version, block
    gc.collect()
    assert opened.tables == {"public.t0", "public.t1"}
    assert not any(ref() for ref in kept)
