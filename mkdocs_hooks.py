"""Makes of the repository's pages the site's: mkdocs calls it (mkdocs.yml).

The pages link to each other as they lie in the repository, so that a forge shows them.
The site has ``docs/`` alone. So README, CONTRIBUTING and CHANGELOG become pages of it, and files that are linked to
become chapters of one page. Links to them are turned. A link whose text is a file's name gets the page's title for it.
A link that leads nowhere stays as it is, and the strict build fails.

Rejected: plugins that include files, with a stub for each page, because they turn no links to folders. Links to a
forge, because the repository does not know where it lies.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parent
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Of the repository → of the site."""
SHOWN: Final = {
    "Examples": ["examples/*.py"],
    "Ray's cluster launcher": ["cluster.yaml", "cluster.local.yaml"],
    "A service of systemd": ["deploy/systemd/*"],
    "The image": ["deploy/Dockerfile"],
    "Kubernetes": ["deploy/kubernetes/*.yaml"],
    "Helm chart": ["deploy/chart/*.yaml", "deploy/chart/*/*-values.yaml", "deploy/chart/templates/*"],
    "Prometheus": ["observability/alerts.yml"],
}
"""Chapters of files.md, and the files in them."""
_FOLDERS: Final = {
    "examples": "examples",
    "deploy/chart": "helm-chart",
    "deploy/kubernetes": "kubernetes",
    "deploy/systemd": "a-service-of-systemd",
}
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}
_FENCED: Final = re.compile(r"^(```.*?^```)", re.S | re.M)
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FILE_NAME: Final = re.compile(r"(?:[\w-]+/)*[\w-]+\.md")


def on_files(files: Files, config: Any) -> Files:
    """mkdocs has found the files of docs/: add those from elsewhere."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "files.md", content=_files_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a page that lead out of docs/, and those of a page that lies outside of it."""
    here = page.file.src_uri
    source = next((name for name, made in PAGES.items() if made == here), f"docs/{here}")
    titles = _titles(config["nav"])

    def turned(link: re.Match[str]) -> str:
        text, target = link[1], _turned(link[2], source, here)
        if _FILE_NAME.fullmatch(text):
            found = posixpath.normpath(posixpath.join(posixpath.dirname(here), target.partition("#")[0]))
            text = titles.get(found, text)
        return f"[{text}]({target})"

    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)


def _titles(nav: Any) -> dict[str, str]:
    """Page → title, of mkdocs.yml's nav."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, below in entry.items():
            found |= {below: title} if isinstance(below, str) else _titles(below)
    return found


def _turned(target: str, source: str, here: str) -> str:
    """``source``: the page in the repository; ``here``: in the site."""
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return target
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if found in PAGES:
        found = PAGES[found]
    elif found in _FOLDERS:
        found, anchor = "files.md", _FOLDERS[found]
    elif any(Path(found).match(pattern) for patterns in SHOWN.values() for pattern in patterns):
        found, anchor = "files.md", _anchor(found)
    else:
        found = found.removeprefix("docs/")
    turned = posixpath.relpath(found, posixpath.dirname(here) or ".")
    return f"{turned}#{anchor}" if anchor else turned


def _files_page() -> str:
    text = ["# Examples and manifests\n\nFiles of the repository that other pages name, as they are.\n"]
    for title, patterns in SHOWN.items():
        text.append(f"\n## {title}\n")
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            content = path.read_text(encoding="utf-8").rstrip()
            text.append(
                f"\n### {name} {{ #{_anchor(name)} }}\n\n```{_LANGUAGES.get(path.suffix, 'text')}\n{content}\n```\n"
            )
    return "".join(text)


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
