"""``make audit``: holds what is installed against OSV, the database of advisories (https://osv.dev): packages and jars.

pip-audit knows Python packages alone, and Spark brings 250 jars. A jar names what it is made of in the
``pom.properties`` within it, also where others were packed into it; some have only their file's name. OSV has the
advisories of PyPI and of Maven, and needs no key.

It needs the network, so no test asks OSV itself. Where nothing could be asked it says so, and ends with status 2.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata, util
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from packaging.utils import canonicalize_name

_URL: Final = "https://api.osv.dev"
_AT_ONCE: Final = 500
"""OSV takes 1,000."""
_WITH_JARS: Final = ("pyspark", "raydp", "ray")


_NAME: Final = re.compile(r"(?P<artifact>.+?)-(?P<version>\d.*)\.jar")
_VENDOR: Final = re.compile(r"^Implementation-Vendor-Id: (\S+)", re.MULTILINE)
_GROUPS: Final = {
    "derby": "org.apache.derby",
    "gson": "com.google.code.gson",
    "ivy": "org.apache.ivy",
    "jackson-core-asl": "org.codehaus.jackson",
    "jackson-mapper-asl": "org.codehaus.jackson",
    "jodd-core": "org.jodd",
    "libthrift": "org.apache.thrift",
    "lz4-java": "org.lz4",
    "RoaringBitmap": "org.roaringbitmap",
    "rocksdbjni": "org.rocksdb",
    "scala-library": "org.scala-lang",
    "tink": "com.google.crypto.tink",
    "xz": "org.tukaani",
}
"""Of jars that do not tell it."""


class Component(NamedTuple):
    """``ecosystem`` and ``name`` as OSV has them. ``where``: the package, or the jar."""

    ecosystem: str
    name: str
    version: str
    where: str


class NothingAsked(Exception):
    """OSV gave no answer, or one that is none."""


def packages() -> Iterator[Component]:
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name != "xidstream":
            yield Component("PyPI", canonicalize_name(name), each.version, name)


def jars(folder: Path) -> Iterator[Component]:
    """What the jars below a folder are made of."""
    for jar in sorted(folder.rglob("*.jar")):
        with zipfile.ZipFile(jar) as archive:
            for entry in archive.namelist():
                if entry.startswith("META-INF/maven/") and entry.endswith("/pom.properties"):
                    lines = archive.read(entry).decode(errors="replace").splitlines()
                    pom = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
                    if {"groupId", "artifactId", "version"} <= pom.keys():
                        name = f"{pom['groupId'].strip()}:{pom['artifactId'].strip()}"
                        yield Component("Maven", name, pom["version"].strip(), jar.name)
            if not any(entry.endswith("/pom.properties") for entry in archive.namelist()):
                yield from _by_its_name(jar, _manifest(archive))


def _manifest(archive: zipfile.ZipFile) -> str:
    """Empty where there is none: jars of Spark 4 are among these."""
    try:
        return archive.read("META-INF/MANIFEST.MF").decode(errors="replace")
    except KeyError:
        return ""


def _by_its_name(jar: Path, manifest: str) -> Iterator[Component]:
    name, vendor = _NAME.fullmatch(jar.name), _VENDOR.search(manifest)
    if name is not None:
        group = _GROUPS.get(name["artifact"]) or (vendor[1] if vendor else "")
        yield Component("Maven", f"{group}:{name['artifact']}", name["version"], jar.name)


def advisories(components: Sequence[Component], url: str) -> dict[Component, list[str]]:
    """The names of the advisories of those that have any. Raises NothingAsked."""
    found = {}
    left = iter(components)
    while some := list(islice(left, _AT_ONCE)):
        for component, ids in zip(some, _ask(some, url), strict=True):
            if ids:
                found[component] = ids
    return found


def _ask(components: Sequence[Component], url: str) -> list[list[str]]:
    queries = [
        {"package": {"ecosystem": each.ecosystem, "name": each.name}, "version": each.version}
        for each in components
    ]
    request = urllib.request.Request(
        f"{url}/v1/querybatch",
        json.dumps({"queries": queries}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            results = json.load(answer)["results"]
        if len(results) != len(components):
            raise NothingAsked(f"{url} answered {len(results)} of {len(components)} questions")
        return [sorted(each["id"] for each in result.get("vulns", ())) for result in results]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = getattr(error, "reason", None) or error
        raise NothingAsked(f"{url} cannot be asked: {reason}") from error


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=_URL, help="of OSV, or of a mirror of it")
    url = parser.parse_args(None if arguments is None else list(arguments)).url
    components = [*packages()]
    for name in _WITH_JARS:
        spec = util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            components += jars(Path(spec.submodule_search_locations[0], "jars"))
    unknown = {each.where for each in components if each.name.startswith(":")}
    components = sorted({each for each in components if each.where not in unknown})
    try:
        found = advisories(components, url)
    except NothingAsked as error:
        print(f"NOT CHECKED: {error}", file=sys.stderr)
        return 2
    for component, ids in found.items():
        print(f"{component.where}: {component.name} {component.version}: {', '.join(ids)}")
    if unknown:
        print(f"not known to Maven by their names, and not asked for: {', '.join(sorted(unknown))}")
    print(f"{len(components)} components asked for, {len(found)} with advisories")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
