"""Decodes blocks of few bytes in the slot reader's own process, so that a trickle costs no calls to buffers.

At some transactions a second each comes in a block of its own. Its call to a buffer costs the reader, the buffer and
the raylet 2 ms of CPU time and more, and its decoding a fraction of that. The reader therefore decodes such a block
itself and gives the rows with its entry to the sequencer: one call for a transaction, and not two.

The code is that of a buffer, ``TransactionBuffer.decode_plain``, and so are the guarantees. Nothing stays here behind
the call: small transactions are whole, and released at once, so there is nothing to spill or to move. What cannot be
decoded is noted in the content. Rows that are too many to travel by value (``hold_arrow``) are an object of this
process. The reader owns the buffers, and all of them end with their epoch, so it is lost when one of theirs would be.

The kernels take 0.4 s of CPU time and 30 MB. A run that never gets a trickle does not load them: they are loaded on a
thread when ``LOADING_AFTER`` small blocks have come, and until they are there, blocks go to buffers.

Rejected: decoding in the sequencer, whose event loop everything waits for; buffers that call the sequencer themselves,
which only moves the second call from the reader to the buffer.

``BufferPool`` calls it, on the sending thread alone.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.object_store import hold_arrow
from xidstream.pipeline.exchange import Sealed
from xidstream.pipeline.stream import Block
from xidstream.pipeline.transactions.buffer_calls import BufferSettings
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer

SMALL_BYTES: Final = 8 << 10
"""The most raw bytes of a block that is decoded here: what decoding costs grows with them, and what a call costs hardly
does."""
LOADING_AFTER: Final = 16


class SmallBlocks:
    """``settings``: those of the buffers. Nothing is loaded yet."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._n_seen = 0
        self._decoder: Future[TransactionBuffer] | None = None

    def decode(self, block: Block) -> Sealed | None:
        """The content of a block of whole small transactions; None where a buffer is to decode it. The block's arrays
        are not referred to afterwards. Raises what loading raised, and what a buffer raises."""
        if block.n_bytes > SMALL_BYTES:
            return None
        decoder = self._loaded()
        if decoder is None:
            return None
        versions = block.relations.versions
        # A copy: the arrays serve again, and it must not matter whether a decoded column lies in them.
        return decoder.decode_plain(tuple(versions), versions, (block.payload.copy(), block.lengths.copy()))

    def _loaded(self) -> TransactionBuffer | None:
        if self._decoder is None:
            self._n_seen += 1
            if self._n_seen < LOADING_AFTER:
                return None
            loading = ThreadPoolExecutor(1, "loading-kernels")
            self._decoder = loading.submit(self._load)
            loading.shutdown(wait=False)
        return self._decoder.result() if self._decoder.done() else None

    def _load(self) -> TransactionBuffer:
        # It makes arrays from here on.
        skip_pandas_import()
        return TransactionBuffer(self._settings, hold_arrow)
