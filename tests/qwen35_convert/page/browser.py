"""A headless Chromium, driven through chromedriver by plain HTTP: W3C WebDriver and CDP.

Source: https://www.w3.org/TR/webdriver2/; `goog/cdp/execute` is chromedriver's way to CDP.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
SERVED = re.compile(r"started successfully on port (\d+)")
LOGS = {"browser": "ALL", "performance": "ALL"}


def is_here() -> bool:
    """Whether both programs are installed."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


@dataclass
class Browser:
    """One window."""

    session: str

    def call(self, path: str, *, method: str = "POST", **body: Any) -> Any:
        content = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            f"{self.session}/{path}".rstrip("/"),
            content,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.call("goog/cdp/execute", cmd=command, params=parameters)

    def show(self, page: Path, width: int, *, dark: bool) -> None:
        """Open a page in a window of this width."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("url", url=page.resolve().as_uri())

    def ask(self, expression: str) -> Any:
        """Return what a JavaScript expression gives; CDP asks, the page's policy runs no script."""
        told = self.cdp("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def picture(self) -> bytes:
        """Return the whole page as a PNG."""
        told = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the console (`browser`), or CDP's events (`performance`), since last asked."""
        return self.call("se/log", type=kind)


@contextmanager
def opened() -> Iterator[Browser]:
    """Give a browser."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        assert driver.stdout is not None
        ports = (SERVED.search(line) for line in driver.stdout)
        port = next(match[1] for match in ports if match)
        server = Browser(f"http://127.0.0.1:{port}")
        wanted = {
            "goog:chromeOptions": {"args": ARGUMENTS, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": LOGS,
        }
        made = server.call("session", capabilities={"alwaysMatch": wanted})
        browser = Browser(f"{server.session}/session/{made['sessionId']}")
        try:
            yield browser
        finally:
            browser.call("", method="DELETE")
    finally:
        driver.terminate()
        driver.communicate()
