"""A headless browser for the tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def browse(path: Path, address: str = "", script: str = "", width: int = 1280) -> str:
    """What a browser makes of a page: its DOM once `script` has run. No error may be logged."""
    if script:
        text = path.read_text(encoding="utf-8")
        end = text.rindex("</body>")
        path = path.with_name("scripted.html")
        text = text[:end].replace("const EVERY = 128", "const EVERY = 8")
        path.write_text(f"{text}<script>{{{script}}}</script></body></html>", encoding="utf-8")
    browser = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--v=0", f"--window-size={width},1000"),
            *(f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=1000"),
            f"{path.as_uri()}#{address}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    logged = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    assert browser.returncode == 0 and not logged, logged
    return browser.stdout
