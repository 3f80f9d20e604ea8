"""What ``xidstream source prepare`` puts into a database: event triggers that write a logical message for each DDL.

A look at the catalog finds that a table was altered, and not when. A message stands in the stream at the very place of
the DDL, in its transaction, and rolls back with it (``pipeline.snapshot.ddl`` reads it). Three event triggers call one
function: ``ddl_command_end``, ``sql_drop`` and ``table_rewrite``. What they tell is small: the command's tag, the
tables with their partitioned ancestors, and why a table was written anew. No SQL text, and no value.

What the function must not do is fail or slow down somebody's DDL:

- All that it looks up is in a block of its own, whose errors become a warning. The block is a subtransaction, but one
  that writes nothing, so it takes no xid. The message is written after it, in the command's own transaction. Within
  the block each DDL would take a subtransaction's xid, and a restore in one transaction would overflow the 64 that a
  session can show to the others.
- The message itself fails only where EXECUTE on ``pg_logical_emit_message`` was revoked. That is asked before. Where
  anything else failed, a message without a mark is tried: silence would pass for no DDL.
- It is SECURITY DEFINER, so that it depends on nobody's rights. Whoever runs the DDL could then have functions and
  operators of his own run with the owner's rights, if names were looked up by his ``search_path``: it is pinned.
- Nobody needs EXECUTE on it: event triggers do not ask for it, and it is revoked from PUBLIC.
- CREATE, COMMENT, GRANT and the like alter no table, and end at the first line.
- A temporary table is never published, so nothing is told of it.

The triggers are ENABLE ALWAYS, so they fire under ``session_replication_role = replica`` as well. They do not fire in
single-user mode, under ``event_triggers = off`` (17, a superuser's), for TRUNCATE, and for commands about event
triggers and shared objects. A read-only transaction and a standby have no DDL.

Every message has a ``mark``, and so has what ``installed`` finds: a hash of the catalog rows that make up triggers and
function, with who wrote each. If two marks are equal, nobody has dropped, disabled or replaced anything in between.

Rejected: a tag filter (``WHEN TAG IN``), because one DDL that nobody thought of would be missed for ever; and the
command's text, which may quote a value.

Used by the command line, by the preflight and by ``catalog_watch``.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import PreconditionMissing, Unsupported
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.pg_rules import DDL_PREFIX
from xidstream.pipeline.postgres.admin import translated
from xidstream.pipeline.postgres.stream_options import PG14, version_text

VERSION: Final = 1
"""The version of the function and its messages. A change of either takes the next one."""
_DOING: Final = "the event triggers"
_EVENTS: Final = {
    "xidstream_ddl": "ddl_command_end",
    "xidstream_drop": "sql_drop",
    "xidstream_rewrite": "table_rewrite",
}
_NAMES: Final = ", ".join(f"'{name}'" for name in _EVENTS)
_MARK: Final = """hashtextextended(
    string_agg(concat_ws(' ', t.oid, t.xmin, t.evtenabled, p.oid, p.xmin), ' ' ORDER BY t.oid)
    || (SELECT ' ' || min(e.xmin::text) FROM pg_proc AS e
        WHERE e.proname = 'pg_logical_emit_message' AND e.pronamespace = 11 AND e.proargtypes[2] = 25), 0)"""
"""With the row of the function that writes messages: REVOKE and GRANT on it change that one."""
_BODY: Final = f"""
DECLARE
  told json;
  mark bigint;
  may boolean;
BEGIN
  -- Nothing of a published table changes by these. An extension's script may alter one.
  IF left(tg_tag, 6) IN ('CREATE', 'COMMEN', 'GRANT', 'REVOKE', 'SECURI', 'REFRES', 'REINDE')
      AND tg_tag NOT IN ('CREATE EXTENSION', 'CREATE PUBLICATION') THEN
    RETURN;
  END IF;
  BEGIN
    IF tg_event = 'table_rewrite' THEN
      SELECT json_agg(json_build_object('relid', c.oid::bigint, 'above', ARRAY(
               SELECT a.relid::oid::bigint FROM pg_partition_ancestors(c.oid) AS a),
               'rewritten', pg_event_trigger_table_rewrite_reason()))
        INTO told FROM pg_class AS c
        WHERE c.oid = pg_event_trigger_table_rewrite_oid() AND c.relpersistence <> 't';
    ELSIF tg_event = 'sql_drop' THEN
      SELECT json_agg(json_build_object('relid', d.objid::bigint, 'dropped', d.objsubid = 0))
        INTO told FROM pg_event_trigger_dropped_objects() AS d
        WHERE d.classid = 'pg_class'::regclass AND d.object_type LIKE 'table%' AND NOT d.is_temporary;
      IF told IS NULL AND tg_tag NOT IN ('ALTER TABLE', 'DROP TABLE') AND EXISTS (
          SELECT FROM pg_event_trigger_dropped_objects() AS d
          WHERE NOT d.is_temporary AND (d.original OR d.normal)
            AND d.object_type ~ '(type|domain|schema|publication|table constraint|index)') THEN
        told := '[]';
      END IF;
    ELSE
      SELECT json_agg(json_build_object('relid', c.oid::bigint, 'above', ARRAY(
               SELECT a.relid::oid::bigint FROM pg_partition_ancestors(c.oid) AS a),
               'persistence', c.relpersistence, 'schema', n.nspname, 'table', c.relname))
        INTO told
        FROM (SELECT DISTINCT o.objid FROM pg_event_trigger_ddl_commands() AS o
              WHERE o.classid = 'pg_class'::regclass AND o.command_tag NOT LIKE 'C%') AS o
        JOIN pg_class AS c ON c.oid = o.objid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't';
      IF told IS NULL AND tg_tag <> 'ALTER TABLE' AND EXISTS (
          SELECT FROM pg_event_trigger_ddl_commands() AS o
          WHERE o.object_type ~ '(type|domain|schema|publication|index)'
            AND (o.command_tag NOT LIKE 'C%' OR o.object_type LIKE 'publication%')
            AND o.schema_name IS DISTINCT FROM 'pg_temp') THEN
        told := '[]';
      END IF;
    END IF;
    IF told IS NULL THEN
      RETURN;
    END IF;
    SELECT {_MARK}, (SELECT bool_and(has_function_privilege(p.oid, 'EXECUTE')) FROM pg_proc AS p
                     WHERE p.proname = 'pg_logical_emit_message' AND p.pronamespace = 11)
      INTO mark, may
      FROM pg_event_trigger AS t JOIN pg_proc AS p ON p.oid = t.evtfoid WHERE t.evtname IN ({_NAMES});
    IF NOT may THEN
      RAISE EXCEPTION 'EXECUTE on pg_logical_emit_message was revoked';
    END IF;
  EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'xidstream was not told of %: %', tg_tag, sqlerrm;
    BEGIN
      -- Without a mark: whoever reads it knows that something is missing here.
      PERFORM pg_logical_emit_message(true, '{DDL_PREFIX}', json_build_object('version', {VERSION}, 'tag', tg_tag,
        'mark', NULL, 'tables', ARRAY[]::int[])::text);
    EXCEPTION WHEN OTHERS THEN
      NULL;
    END;
    RETURN;
  END;
  PERFORM pg_logical_emit_message(true, '{DDL_PREFIX}', json_build_object('version', {VERSION}, 'tag', tg_tag,
    'mark', mark, 'tables', told)::text);
END
"""
_COMMENT: Final = re.compile(r"xidstream source prepare, version ([0-9]{1,6})\b")

# CREATE OR REPLACE would keep the owner of a function that somebody had put there, who may change it then.
_DROPS: Final = (
    *(f"DROP EVENT TRIGGER IF EXISTS {name}" for name in _EVENTS),
    "DROP FUNCTION IF EXISTS xidstream.note_ddl()",
)
PREPARE: Final = (
    "CREATE SCHEMA IF NOT EXISTS xidstream",
    *_DROPS,
    f"""CREATE FUNCTION xidstream.note_ddl() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $xidstream${_BODY}$xidstream$""",
    f"COMMENT ON FUNCTION xidstream.note_ddl() IS 'xidstream source prepare, version {VERSION}'",
    "REVOKE ALL ON FUNCTION xidstream.note_ddl() FROM PUBLIC",
    *(
        f"CREATE EVENT TRIGGER {name} ON {event} EXECUTE FUNCTION xidstream.note_ddl()"
        for name, event in _EVENTS.items()
    ),
    *(f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS" for name in _EVENTS),
)
"""One transaction. To repeat it changes the mark, and nothing else."""
UNPREPARE: Final = (
    *_DROPS,
    # Only if it is empty: somebody else may have put something there.
    "DO $$ BEGIN DROP SCHEMA IF EXISTS xidstream; EXCEPTION WHEN dependent_objects_still_exist THEN NULL; END $$",
)
REMEDY: Final = (
    "run it as a superuser, on a managed service as its main user; or have `xidstream source prepare --print` print "
    "the SQL for whoever may"
)

_INSTALLED: Final = f"""
    SELECT f.prosrc, obj_description(f.oid, 'pg_proc'),
           f.prosecdef AND f.proconfig = ARRAY['search_path=pg_catalog, pg_temp'],
           t.events, t.is_enabled, t.mark
    FROM (SELECT array_agg(t.evtname || ' ' || t.evtevent ORDER BY t.evtname) AS events,
                 bool_and(t.evtenabled = 'A' AND t.evttags IS NULL) AS is_enabled, {_MARK} AS mark
          FROM pg_event_trigger AS t JOIN pg_proc AS p ON p.oid = t.evtfoid
          JOIN pg_namespace AS n ON n.oid = p.pronamespace
          WHERE t.evtname IN ({_NAMES}) AND p.proname = 'note_ddl' AND n.nspname = 'xidstream') AS t
    LEFT JOIN (SELECT p.* FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
               WHERE n.nspname = 'xidstream' AND p.proname = 'note_ddl') AS f ON true
"""


class TriggerState(enum.Enum):
    ABSENT = "absent"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    DISABLED = "disabled"
    CHANGED = "changed"  # something of it is missing, or is not what this version installs


@dataclass(frozen=True)
class Installed:
    """``version``: None where there is nothing, or nothing that says so. ``mark``: see the module; None unless the
    triggers are there as this version installs them."""

    state: TriggerState
    version: int | None = None
    mark: int | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        return {
            TriggerState.ABSENT: "absent: DDL leaves no message in the stream",
            TriggerState.CURRENT: f"current (version {VERSION}): DDL leaves a message in the stream",
            TriggerState.OLDER: f"older: version {self.version}, and this xidstream's is {VERSION}",
            TriggerState.NEWER: f"newer: version {self.version}, and this xidstream's is {VERSION}",
            TriggerState.DISABLED: "disabled, or not enabled for all sessions (ENABLE ALWAYS)",
            TriggerState.CHANGED: "changed: an event trigger is missing, or the function is not what was installed",
        }[self.state]


def installed(connection: psycopg.Connection[Any]) -> Installed:
    """The triggers that are there now. Needs no rights. Errors are psycopg's."""
    row = connection.execute(_INSTALLED.encode()).fetchone()
    assert row is not None
    source, comment, is_safe, events, is_enabled, mark = row
    if source is None:
        return Installed(TriggerState.ABSENT)
    found = _COMMENT.match(comment or "")
    version = None if found is None else int(found[1])
    if version is not None and version != VERSION:
        return Installed(TriggerState.OLDER if version < VERSION else TriggerState.NEWER, version)
    wanted = sorted(f"{name} {event}" for name, event in _EVENTS.items())
    if version is None or source != _BODY or not is_safe or events != wanted:
        return Installed(TriggerState.CHANGED, version)
    if not is_enabled:
        return Installed(TriggerState.DISABLED, version)
    return Installed(TriggerState.CURRENT, version, mark)


def prepare(connection: psycopg.Connection[Any]) -> bool:
    """Install it, or bring it up to this version; whether there was anything to do.

    Raises PreconditionMissing where the role may not, Unsupported for a server that it cannot be for."""
    _check_server(connection)
    with translated(_DOING):
        if installed(connection).state is TriggerState.CURRENT:
            return False
    _run(connection, PREPARE)
    return True


def unprepare(connection: psycopg.Connection[Any]) -> None:
    """Remove it, whatever version it has. Raises what ``prepare`` raises."""
    _check_server(connection)
    _run(connection, UNPREPARE)


def script(statements: tuple[str, ...]) -> str:
    """The SQL for a person to run."""
    return "".join(f"{statement};\n" for statement in ("BEGIN", *statements, "COMMIT"))


def trigger_finding(connection: psycopg.Connection[Any]) -> list[Finding]:
    """A finding of the preflight: that it is there, or what is missing without. Errors are psycopg's."""
    if connection.info.server_version < PG14:
        return []
    found = installed(connection)
    if found.state is TriggerState.CURRENT:
        return [Finding.ok("ddl_trigger", "DDL leaves a message in the stream (source prepare)")]
    text = (
        f"recommended: the event triggers for DDL are {found.state.value}; without them SET UNLOGGED, a load and SET "
        "LOGGED within a second stay unseen, and an altered table's last second before the DDL cannot be read"
    )
    return [
        Finding.ok(
            "ddl_trigger", f"{text}; `xidstream source prepare` installs them, as a superuser (docs/ddl.md)"
        )
    ]


def _check_server(connection: psycopg.Connection[Any]) -> None:
    version = connection.info.server_version
    if version < PG14:
        raise Unsupported(
            f"PostgreSQL {version_text(version)} sends no logical messages",
            remedy="14 or newer does: upgrade",
        )
    with translated(_DOING):
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    if row == (True,):
        raise Unsupported("this is a standby: it has its primary's event triggers", remedy="use the primary")


def _run(connection: psycopg.Connection[Any], statements: tuple[str, ...]) -> None:
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreconditionMissing(
            f"the role may not: {error.diag.message_primary or 'permission denied'}", remedy=REMEDY
        ) from None
    except psycopg.Error:
        with translated(_DOING):
            raise
