"""Each SQLSTATE and each connection error that matters, as ours; no server, only its words."""

from __future__ import annotations

import datetime

import psycopg
import pytest

from xidstream.pipeline.errors import (
    Action,
    ConnectionLost,
    EnvironmentFault,
    LoginRefused,
    PoisonedChange,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.findings import Status
from xidstream.pipeline.postgres.failures import (
    ServerReport,
    from_connect_error,
    from_error,
    from_report,
)
from xidstream.pipeline.postgres.preflight import check_clock, check_output_plugin_libraries


@pytest.mark.parametrize(
    ("sqlstate", "message", "function", "expected"),
    [
        ("55006", 'replication slot "s" is active for PID 1', "ReplicationSlotAcquire", SlotInUse),
        ("55000", 'can no longer get changes from replication slot "s"', "CreateDecodingContext", SlotLost),
        ("55000", 'can no longer access replication slot "s"', "ReplicationSlotAcquire", SlotLost),
        ("55000", "logische Dekodierung benötigt …", "CheckLogicalDecodingRequirements", PreconditionMissing),
        ("55000", 'replication slot "s" was not created in this database', "", PreconditionMissing),
        ("42704", 'publication "p" does not exist', "GetPublicationByName", PreconditionMissing),
        ("42704", 'replication slot "s" does not exist', "ReplicationSlotAcquire", PreconditionMissing),
        ("42710", 'replication slot "s" already exists', "ReplicationSlotCreate", PreconditionMissing),
        ("58P01", "requested WAL segment 0001 has already been removed", "", SlotLost),
        ("58P01", 'could not access file "pgoutput"', "", EnvironmentFault),
        ("28P01", "password authentication failed", "", LoginRefused),
        ("28000", "no pg_hba.conf entry", "", LoginRefused),
        ("3D000", 'database "d" does not exist', "", PreconditionMissing),
        ("42501", "permission denied to use replication slots", "", PreconditionMissing),
        ("53400", "all replication slots are in use", "", PreconditionMissing),
        ("0A000", "option is not supported", "", Unsupported),
        ("57P01", "terminating connection due to administrator command", "", ConnectionLost),
        ("57P02", "terminating connection because of crash of another server process", "", ConnectionLost),
        ("57P03", "the database system is starting up", "", ConnectionLost),
        ("08006", "connection failure", "", ConnectionLost),
        ("57014", "canceling statement due to user request", "", ConnectionLost),
        ("53100", "could not write to file: No space left on device", "", EnvironmentFault),
        ("XX000", "unexpected", "", EnvironmentFault),
    ],
)
def test_report_of_the_server_becomes_the_class_that_says_what_to_do(
    sqlstate: str, message: str, function: str, expected: type[XidstreamError]
) -> None:
    error = from_report(ServerReport(sqlstate, message, function), "START_REPLICATION")
    assert type(error) is expected
    assert str(error) == f"START_REPLICATION: {message} (SQLSTATE {sqlstate})"


def test_value_that_cannot_be_converted_is_poison_and_not_repeated() -> None:
    text = "character with byte sequence 0xe2 0x82 in encoding … has no equivalent"
    error = from_report(ServerReport("22P05", text, ""), "reading")
    assert type(error) is PoisonedChange
    assert "0xe2" not in str(error)
    report = ServerReport("22P05", text, "", change_lsn="0/1A2B3C")
    assert "LSN 0/1A2B3C" in str(from_report(report, "reading"))


@pytest.mark.parametrize(
    ("sqlstate", "message", "function"),
    [
        ("54000", "string buffer exceeds maximum allowed length (1073741823 bytes)", "enlargeStringInfo"),
        ("54000", "out of memory", "enlargeStringInfo"),
        ("XX000", "invalid memory alloc request size 1258291203", "MemoryContextSizeFailure"),
    ],
)
def test_row_that_is_too_large_to_be_sent_is_poison_and_not_tried_for_ever(
    sqlstate: str, message: str, function: str
) -> None:
    error = from_report(ServerReport(sqlstate, message, function, change_lsn="0/1A2B3C"), "reading")
    assert type(error) is PoisonedChange
    assert "LSN 0/1A2B3C" in str(error) and "1 GB" in str(error)
    lack = from_report(ServerReport("53200", "out of memory", "AllocSetAlloc"), "reading")
    assert type(lack) is EnvironmentFault, "of memory, which may be there the next time"


def test_remedies_differ_by_what_is_missing() -> None:
    def remedy(sqlstate: str, message: str) -> str:
        return from_report(ServerReport(sqlstate, message, ""), "x").remedy

    assert "slot create" in remedy("42704", 'replication slot "s" does not exist')
    assert "name" in remedy("42704", 'publication "p" does not exist')
    assert "REPLICATION" in remedy("42501", "must be superuser or replication role to use replication slots")
    assert "output_plugin_libraries" in remedy(
        "42501", 'library "pgoutput" may not be used as an output plugin'
    )
    assert "wal_level = logical" in remedy("55000", "logical decoding requires wal_level >= logical")


def test_long_and_multi_line_text_is_one_bounded_line() -> None:
    error = from_report(ServerReport("XX000", "a\n\tb " + "c" * 10_000, ""), "x")
    assert "\n" not in str(error)
    assert len(str(error)) < 600
    assert str(error).startswith("x: a b ")


def test_error_without_sqlstate_is_a_lost_connection() -> None:
    error = from_error(
        psycopg.OperationalError("server closed the connection unexpectedly\n\tThis probably"), "r"
    )
    assert type(error) is ConnectionLost


@pytest.mark.parametrize(
    ("text", "expected", "statement"),
    [
        (
            'FATAL:  password authentication failed for user "u"',
            LoginRefused,
            "wrong or missing password",
        ),
        ("fe_sendauth: no password supplied", LoginRefused, "wrong or missing password"),
        (
            'FATAL:  no pg_hba.conf entry for host "h", no encryption',
            LoginRefused,
            "the server's pg_hba",
        ),
        ('FATAL:  Peer authentication failed for user "u"', LoginRefused, "the server's pg_hba"),
        ('FATAL:  database "d" does not exist', PreconditionMissing, "unknown database"),
        ('FATAL:  role "r" does not exist', LoginRefused, "unknown role"),
        ("FATAL:  permission denied to start WAL sender", PreconditionMissing, "the role lacks"),
        (
            "FATAL:  must be superuser or replication role to start walsender",
            PreconditionMissing,
            "the role lacks",
        ),
        ("FATAL:  sorry, too many clients already", ConnectionLost, "the server has no free connection"),
        ("FATAL:  the database system is starting up", ConnectionLost, "the server is not ready"),
        ('FATAL:  role "r" is not permitted to log in', LoginRefused, "unknown role"),
        (
            'FATAL:  PAM authentication failed for user "u"',
            LoginRefused,
            "the server does not take this token",
        ),
        ('FATAL:  Cloud SQL IAM user authentication failed for user "u"', LoginRefused, "the server"),
        ("FATAL:  The access token has expired", LoginRefused, "the server does not take this token"),
        ("FATAL:  The access token has invalid format.", LoginRefused, "the server does not take this token"),
        ('invalid sslmode value: "never"', PreconditionMissing, "libpq does not take"),
        ("connection timeout expired", ConnectionLost, "the server does not answer"),
        ("No route to host", ConnectionLost, "the server does not answer"),
        ("FATAL:  Passwort-Authentifizierung fehlgeschlagen", ConnectionLost, "cannot connect"),
    ],
)
def test_connection_errors_are_told_apart(text: str, expected: type[XidstreamError], statement: str) -> None:
    raised = psycopg.OperationalError(
        f'connection failed: connection to server at "h", port 1 failed: {text}'
    )
    error = from_connect_error(raised, "host=h")
    assert type(error) is expected
    assert str(error).startswith(statement)
    assert error.remedy


@pytest.mark.parametrize(
    "text",
    [
        # fe-connect.c, fe-secure.c and fe-secure-openssl.c, from libpq 10 to 18
        "server does not support SSL, but SSL was required",
        "SSL connection is required",
        "direct SSL connection was established without ALPN protocol negotiation extension",
        "SSL error: certificate verify failed",
        "SSL error: ssl/tls alert bad certificate",
        "SSL error: tlsv1 alert unknown ca",
        "SSL error: tlsv13 alert certificate required",
        "SSL error: sslv3 alert certificate expired",
        (
            "SSL error: unsupported protocol\nThis may indicate that the server does not support any SSL protocol "
            "version between TLSv1.2 and TLSv1.3."
        ),
        "SSL error: tlsv1 alert protocol version",
        "SSL error: sslv3 alert handshake failure",
        "SSL error: no shared cipher",
        "SSL error: dh key too small",
        "SSL error: ca md too weak",
        'server certificate for "a" does not match host name "b"',
        'root certificate file "/x/root.crt" does not exist',
        'could not load private key file "/x/k": bad decrypt',
        "channel binding required, but server authenticated client without channel binding",
        "FATAL:  connection requires a valid client certificate",
        "host name must be specified for a verified SSL connection",
        "invalid SSL protocol version range",
        'could not read private SSL key "k" from engine "e": no such key',
        "server did not request an SSL certificate",
    ],
)
def test_what_both_sides_of_tls_would_say_again_is_for_a_person(text: str) -> None:
    raised = psycopg.OperationalError(
        f'connection failed: connection to server at "h", port 1 failed: {text}'
    )
    error = from_connect_error(raised, "host=h")
    assert type(error) is LoginRefused
    assert error.policy.action is Action.STOP
    assert str(error).startswith("TLS cannot be agreed on")


@pytest.mark.parametrize(
    "text",
    [
        "SSL SYSCALL error: Connection reset by peer",
        "SSL SYSCALL error: EOF detected",
        "SSL SYSCALL error: Success",
        "SSL SYSCALL error: Undefined error: 0",
        "SSL SYSCALL error: Connection timed out",
        "SSL SYSCALL error: Broken pipe",
        "SSL error: unexpected eof while reading",
        "SSL error: decryption failed or bad record mac",
        "SSL error: tlsv1 alert internal error",
        "SSL error: wrong version number",
        "SSL connection has been closed unexpectedly",
        "server sent an error response during SSL exchange",
        "received invalid response to SSL negotiation: H",
        "received unencrypted data after SSL response",
        "could not receive data from server: SSL error: shutdown while in init",
        (
            'SSL error: unexpected eof while reading\nconnection to server at "h", port 1 failed: FATAL:  no '
            'pg_hba.conf entry for host "10.0.0.1", user "u", database "d", no encryption'
        ),
        (
            'SSL SYSCALL error: EOF detected\nconnection to server at "h", port 1 failed: FATAL:  no pg_hba.conf '
            'entry for host "10.0.0.1", user "u", database "d", SSL off'
        ),
    ],
)
def test_a_cut_in_the_tls_handshake_is_a_lost_connection(text: str) -> None:
    raised = psycopg.OperationalError(
        f'connection failed: connection to server at "h", port 1 failed: {text}'
    )
    error = from_connect_error(raised, "host=h")
    assert type(error) is ConnectionLost
    assert error.policy.action is Action.RETRY


def test_connection_error_never_shows_the_password() -> None:
    raised = psycopg.OperationalError('connection failed: FATAL:  role "geheim" does not exist')
    assert "geheim" not in str(from_connect_error(raised, "host=h password=geheim"))


def test_skipped_publication_is_recognised_in_any_language() -> None:
    assert ServerReport("55000", "überspringe Publikation", "LoadPublications").skips_publication
    assert not ServerReport("55000", "skipped", "SomethingElse").skips_publication


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("pgoutput, test_decoding", Status.OK),
        ('"pgoutput"', Status.OK),
        ("test_decoding,pgoutput", Status.OK),
        ("test_decoding", Status.FAILED),
        ("", Status.FAILED),
        ("my_pgoutput", Status.FAILED),
    ],
)
def test_output_plugin_libraries_must_list_pgoutput(value: str, status: Status) -> None:
    """Fact 29. The embedded servers are older than the setting, so this is tested on its values."""
    assert check_output_plugin_libraries(value).status is status


@pytest.mark.parametrize(
    ("server_s", "said"),
    [
        (0.0, None),
        (0.9, None),
        (3_600.0, "is 1 h 0 min behind the server's"),
        (-3_600.0, "is 1 h 0 min ahead of the server's"),
        (2.5, "is 2.0 s behind"),
    ],
)
def test_a_clock_that_is_not_the_servers_is_told_because_lags_are_wrong_by_it(
    server_s: float, said: str | None
) -> None:
    """The question takes half a second."""
    asked_at = datetime.datetime(2026, 5, 4, 12, tzinfo=datetime.timezone.utc)
    answered_at = asked_at + datetime.timedelta(seconds=0.5)
    found = check_clock(asked_at, asked_at + datetime.timedelta(seconds=server_s), answered_at)
    assert found.status is (Status.OK if said is None else Status.WARNING)
    assert said is None or said in found.text
