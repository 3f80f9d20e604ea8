"""The statements of the workload, as templates: what is written, and to which tables.

``{ids}`` is a FROM item with a column ``i`` of new ids, ``{where}`` a range of ids, ``{start}`` the first of a
hundred new ids and ``{before}`` one shortly before it, ``{k}`` a number below 200, ``{shift}`` one that no id
reaches, ``{n}`` one that differs each time.
"""

from __future__ import annotations

GIDS = ("g1", "g2", "g3", "../../etc/'\"; drop|é", "g" * 199, " ", "%s {0} \\")
SIZES = (0, 1, 1, 2, 5, 20, 80, 200, 400, 400, 700, 1500)

INSERTS = {
    "plain": "INSERT INTO s.plain SELECT i, i % 10, 'note ' || i, i % 1000 / 100.0 FROM {ids}",
    "full_": "INSERT INTO s.full_ SELECT i, i % 10, 'note ' || i, to_timestamp(i % 9999) FROM {ids}",
    "by_index": "INSERT INTO s.by_index SELECT i, i, 'note ' || i FROM {ids}",
    "log": "INSERT INTO s.log SELECT i, 'log ' || i FROM {ids}",
    "toast": (
        "INSERT INTO s.toast SELECT i, 'small', repeat(md5(i::text), 100), decode(repeat('ab', 3000), 'hex')"
        " FROM {ids}"
    ),
    "toast_full": "INSERT INTO s.toast_full SELECT i, 'small', repeat(md5(i::text), 100) FROM {ids}",
    "toast_key": "INSERT INTO s.toast_key SELECT i || repeat('k', 900), 1, repeat('o', 1500) FROM {ids}",
    "switching": "INSERT INTO s.switching SELECT i, i, 'note ' || i FROM {ids}",
    "types": "",
    "copy": "",
    "moved": "",
    "a": "INSERT INTO s.a SELECT i, 'a' FROM {ids}",
    "odd": 'INSERT INTO s."Odd ""N"" äme" SELECT i, \'x\', 1 FROM {ids}',
    "leafy": "INSERT INTO s.leafy SELECT i, (i + {k}) % 200, 'leaf ' || i FROM {ids}",
    "root": "INSERT INTO r.root SELECT i, (i + {k}) % 200, 'root ' || i FROM {ids}",
    "filtered": "INSERT INTO f.filtered SELECT i, (i + {k}) % 100, 'f ' || i FROM {ids}",
    "listed": "INSERT INTO f.listed SELECT i, 'secret', 'l ' || i FROM {ids}",
    "generated": "INSERT INTO f.generated SELECT i, i % 100 FROM {ids}",
    "ddl1": "INSERT INTO s.ddl1 (id, note) SELECT i, 'ddl ' || i FROM {ids}",
    "ddl2": "INSERT INTO s.ddl2 (id, note) SELECT i, 'ddl ' || i FROM {ids}",
    "ddl3": "INSERT INTO s.ddl3 (id, note) SELECT i, 'ddl ' || i FROM {ids}",
}

UPDATES = (
    "UPDATE s.plain SET note = 'updated {n}', amount = amount + 1 WHERE {where} AND id % 2 = 0",
    "UPDATE s.plain SET id = id + {shift} WHERE {where} AND id % 5 = 1",
    "UPDATE s.full_ SET note = NULL, k = k + 1 WHERE {where} AND id % 2 = 1",
    "UPDATE s.by_index SET note = 'updated' WHERE {where}",
    "UPDATE s.by_index SET k = k + {shift} WHERE {where} AND id % 3 = 1",
    "UPDATE s.toast SET small = 'updated {n}' WHERE {where}",
    "UPDATE s.toast SET big = repeat('y', 4000) WHERE {where} AND id % 2 = 0",
    "UPDATE s.toast SET big2 = NULL, small = 'two' WHERE {where} AND id % 3 = 0",
    "UPDATE s.toast SET id = id + {shift} WHERE {where} AND id % 4 = 0",
    "UPDATE s.toast_full SET small = 'updated {n}' WHERE {where}",
    "UPDATE s.toast_full SET big = 'short' WHERE {where} AND id % 2 = 0",
    "UPDATE s.toast_key SET small = small + 1 WHERE small < 3 AND length(id) % 2 = {k} % 2",
    "UPDATE s.switching SET note = 'updated {n}' WHERE {where}",
    "UPDATE s.switching SET k = k + {shift} WHERE {where} AND id % 3 = 0",
    "UPDATE s.switching SET id = id + {shift} WHERE {where} AND id % 3 = 1",
    "UPDATE s.types SET c12 = 'updated {n}' WHERE {where}",
    "UPDATE s.leafy SET k = {k} WHERE {where} AND id % 2 = 0",
    "UPDATE s.leafy SET note = 'updated' WHERE {where}",
    "UPDATE r.root SET k = {k} WHERE {where} AND id % 2 = 0",
    "UPDATE r.root SET note = 'updated' WHERE {where}",
    "UPDATE f.filtered SET k = {k} % 100 WHERE {where}",
    "UPDATE f.listed SET secret = 'other', note = note || '+' WHERE {where}",
    "UPDATE f.generated SET k = k + 1 WHERE {where}",
    "UPDATE s.a SET note = 'updated' WHERE {where}",
    "UPDATE s.ddl2 SET note = 'updated' WHERE {where}",
    "UPDATE {moved}.moved SET note = 'updated' WHERE {where}",
)

SPECIALS = (
    "TRUNCATE s.log",
    "TRUNCATE s.a CASCADE",
    "TRUNCATE s.b, s.log RESTART IDENTITY",
    "TRUNCATE s.leafy",
    "TRUNCATE r.root",
    "TRUNCATE f.listed, s.toast_full",
    "INSERT INTO s.b SELECT id, 'b' FROM s.a WHERE id BETWEEN {before} - 1000 AND {start} ON CONFLICT DO NOTHING",
    (
        "INSERT INTO s.plain SELECT i, 0, 'upserted' FROM generate_series({before}, {start}) i"
        " ON CONFLICT (id) DO UPDATE SET note = 'conflict', k = excluded.k"
    ),
    (
        "INSERT INTO s.toast SELECT i, 'up', repeat('u', 5000) FROM generate_series({before}, {start}) i"
        " ON CONFLICT (id) DO UPDATE SET small = 'conflict'"
    ),
    (
        "MERGE INTO s.full_ t USING generate_series({before}, {start}) i ON t.id = i"
        " WHEN MATCHED AND i % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET note = 'merged'"
        " WHEN NOT MATCHED THEN INSERT (id, k, note) VALUES (i, 1, 'merged')"
    ),
    "SELECT count(*) FROM (SELECT 1 FROM s.plain WHERE id BETWEEN {before} AND {start} FOR SHARE) x",
    "INSERT INTO s.plain VALUES ({start}, 1, 'fails'), ({start}, 1, 'duplicate')",
    (
        "WITH d AS (DELETE FROM s.plain WHERE id BETWEEN {before} AND {start} AND id % 2 = 0 RETURNING id)"
        " INSERT INTO s.full_ (id, note) SELECT id + 20000000000, 'moved by CTE' FROM d"
    ),
    "INSERT INTO s.toast_key VALUES ('short {start}', 1, repeat('o', 3000))",
    (
        "UPDATE s.plain SET note = 'twice' WHERE id BETWEEN {before} AND {start};"
        " UPDATE s.plain SET note = 'thrice' WHERE id BETWEEN {before} AND {start}"
    ),
    "INSERT INTO hidden.tick VALUES ({k})",
)
