"""A Spark session that did not start: what a person reads."""

from __future__ import annotations

import socket

import pytest

from xidstream.actors.driver.session import not_started


def test_a_host_name_that_cannot_be_resolved_is_told_as_one_with_the_file_to_look_at() -> None:
    with pytest.raises(socket.gaierror) as unresolved:
        socket.getaddrinfo("no-such-host.invalid", None)
    fault = not_started(unresolved.value)
    assert (
        "localhost, or this machine's host name (" in fault.message and "cannot be resolved" in fault.message
    )
    assert "/etc/hosts" in fault.remedy and socket.gethostname() in fault.remedy


def test_another_failure_is_told_by_its_class() -> None:
    fault = not_started(RuntimeError("a value"))
    assert fault.message == "the Spark session did not start: RuntimeError" and "spark_conf" in fault.remedy
