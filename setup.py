"""What pyproject.toml cannot say about the packages. setuptools calls it; `pip install` is how to install.

``xidstream.actors`` and ``xidstream.pipeline`` lie in folders of other names (``xidstream/checkout.py`` says why), and
the search of setuptools takes a package's name from its folder. A list in pyproject.toml would have one line for each.

An editable install warns of folders in the working directory that have the package's name: Python would take them
first. It does, for a namespace package, and everything in it is found all the same (tests/unit/test_import_name.py).
"""

import warnings

from setuptools import find_packages, setup

FOLDERS = ("actors", "pipeline")

warnings.filterwarnings("ignore", r"\s*Editable installation")
found = find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    packages=["xidstream", *(f"xidstream.{name}" for name in found)],
    package_dir={f"xidstream.{name}": name for name in FOLDERS},
)
