"""A page as a picture: drawn by Chromium without a window, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from spec_export.engines.atomic import storage_error
from spec_export.engines.errors import MissingExtra, StorageError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 900
_SECONDS = 120


def write_picture(path: Path, html: str, height: int) -> None:
    """Draw a page into a PNG of 900 pixels by `height`.

    Raises:
        MissingExtra: there is no Chromium.
        StorageError: the picture cannot be written, or Chromium does not draw one.
    """
    browser = find_browser()
    if browser is None:
        raise MissingExtra(
            "a picture is drawn by Chromium, and none is installed; write the report as .html"
        )
    with tempfile.TemporaryDirectory() as folder:
        picture, failed = draw(browser, html, Path(folder), WIDTH, height)
        if picture is None:
            raise StorageError(f"{path} was not written: Chromium drew nothing ({failed[-200:]})")
        try:
            shutil.copyfile(picture, path)
        except OSError as error:
            raise storage_error(error, path) from error


def find_browser() -> str | None:
    """Chromium or a sibling of it on the search path."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def draw(browser: str, html: str, folder: Path, width: int, height: int) -> tuple[Path | None, str]:
    """Show a page; returns the picture, if there is one, and what the browser logged."""
    page, picture = folder / "page.html", folder / "page.png"
    page.write_text(html, encoding="utf-8")
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    flags += [f"--user-data-dir={folder / 'user'}", f"--window-size={width},{height}"]
    try:
        run = subprocess.run(
            [browser, *flags, f"--screenshot={picture}", page.as_uri()],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return (picture if picture.is_file() else None), run.stderr
