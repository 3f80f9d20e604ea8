"""Columnar decoding: blocks of raw pgoutput messages to Arrow record batches, with no Python per row.

::

    blocks    the two entry points for the stream
    copy_binary    the one for COPY's binary format, of a snapshot's rows
    table_decoder  the column loop of one relation version
    numbers | datetimes | binary | arrays | sparse     codecs of text, and the two columns of exceptions
    sent_values | sent_numerics    codecs of what send functions give
    columns   from row cursors to places of values; gathering; UTF-8
    scan      the one pass that checks everything
    bad_values     kernels' codes to errors
    codes     the numbers they agree on

Importing the package loads numba and all kernels (from numba's cache on disk; the first time on a machine it
compiles them), so only processes that decode should import it.
"""

from xidstream.pipeline.decode.blocks import (
    DecodedBlock,
    DecodedPlainBlock,
    decode_plain_block,
    decode_transaction_block,
    warm_up,
)
from xidstream.pipeline.decode.copy_binary import CopiedColumns, ValuesDoNotFit, decode_copied, text_columns

__all__ = [
    "CopiedColumns",
    "DecodedBlock",
    "DecodedPlainBlock",
    "ValuesDoNotFit",
    "decode_copied",
    "decode_plain_block",
    "decode_transaction_block",
    "text_columns",
    "warm_up",
]
