"""What a page is in headless Chromium, after its scripts have run, for tests of the status page."""

from __future__ import annotations

import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WITHOUT = "there is no Chromium on this machine"


def drawn(url: str) -> str:
    """The document as HTML, 4 s after it was asked for. Fails where a script did, or where the page's own policy kept
    something out."""
    assert CHROMIUM is not None, WITHOUT
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    browser = subprocess.run(
        [CHROMIUM, *options, "--enable-logging=stderr", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in browser.stderr, browser.stderr
    return browser.stdout
