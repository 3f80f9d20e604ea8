"""What a change stream tells its buffers of the sink that the script has given it, whatever its settings say."""

from __future__ import annotations

import pytest

from xidstream.actors.api.change_stream import ChangeStream

SETTINGS = {"dsn": "host=h", "slot": "s", "publication": "p", "storage": "/tmp/segments"}


@pytest.mark.parametrize("sink", ["", "console", "delta:/tables"])
def test_the_sink_of_the_script_replaces_that_of_the_settings_without_its_secrets(sink: str) -> None:
    stream = ChangeStream({**SETTINGS, "sink": sink})
    to_delta = stream.toDelta("s3://key:secret@bucket/tables?region=r").trigger(availableNow=True)
    assert to_delta._config.sink == "delta:s3://bucket/tables"
    assert to_delta.foreachBatch(print)._config.sink == ""
    assert stream._config.sink == sink
