"""The folders ``actors/`` and ``pipeline/`` of a checkout, imported as ``xidstream.actors`` and ``xidstream.pipeline``.

In a checkout the two folders lie beside this package, at the top of the repository. In a wheel, and in an environment
that has one installed, they lie inside of it, and nothing here has anything to do: ``package_dir`` of setup.py
puts them there. An editable install has the same mapping in a finder of its own. What is left is a checkout that nobody
installed: a job's working directory, an entry of PYTHONPATH. For these ``xidstream`` calls :func:`load_folders`.

Both packages are loaded at once, with no search. So another checkout that is installed in the same environment, whose
finder knows the same two names, cannot mix its modules with these. Their ``__init__`` modules import nothing.

Static tools read folders and run nothing. For them ``make names`` makes the package's tree in ``build/names``, with
links to each part: mypy, import-linter and editors look there, and ``make lint`` and ``make setup`` renew it.

Rejected: symbolic links under version control, which a checkout on Windows, a source distribution and tools that count
files trip over. The top of the repository in ``xidstream.__path__``, because ``xidstream.tests`` would be a package,
too, and each module of ``pipeline`` would have one more way to be found. A finder on ``sys.meta_path``, which every
later import would ask. An editable install with ``editable_mode=strict``: tools can read it, but it does not see a new
module.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

FOLDERS: Final = ("pipeline", "actors")

IMPORT_ROOT: Final = Path(__file__).parents[1]
"""The folder that another Python needs on its path to import this very package: the checkout, or site-packages.

``xidstream.__file__`` does not tell it. It is None where the working directory has a folder ``xidstream`` and the
package is an editable install: then Python takes that folder for a namespace package."""


def load_folders() -> None:
    """Import ``pipeline`` and ``actors`` from beside this package, unless they lie inside of it."""
    package = sys.modules["xidstream"]
    for name in FOLDERS:
        init = IMPORT_ROOT / name / "__init__.py"
        if Path(__file__).with_name(name).is_dir() or not init.is_file():
            continue  # an installed package, also one in an archive: an import finds it
        spec = spec_from_file_location(f"xidstream.{name}", init)
        assert spec is not None and spec.loader is not None  # the file is there, and is Python's
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        setattr(package, name, module)
