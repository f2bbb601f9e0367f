"""A real Chromium without a screen, and what it needs to look at."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.gateway.conftest import start_gateway

__all__ = ["start_gateway"]

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "out" / "screenshots"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
PATIENCE_S = 20


class Browser:
    """One page in a browser; waits for what it is asked for."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def size(self, width: int, height: int = 1100) -> None:
        """What a window of this size shows, below the least width of a real window too."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url: str) -> None:
        self.driver.get(url)

    def until(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.driver, PATIENCE_S).until(lambda _: condition())

    def pictures(self) -> int:
        """How many pictures the page has drawn."""
        return int(self.run("return document.body.dataset.pictures || 0"))

    def drawn(self) -> None:
        """Wait for the next picture."""
        before = self.pictures()
        self.until(lambda: self.pictures() > before)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Without the risk that the element is replaced between finding and reading."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def screenshot(self, name: str) -> None:
        """The whole page, as `out/screenshots/NAME.png`."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        height = int(self.run("return document.documentElement.scrollHeight"))
        width = int(self.run("return window.innerWidth"))
        self.size(width, height)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """Errors and warnings of the page since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        reason = "Debian's packages chromium and chromium-driver are not installed"
        assert "REQUIRE_BROWSER" not in os.environ, reason
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        started = webdriver.Chrome(options=options, service=Service(chromedriver))
        yield started
        started.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome) -> Iterator[Browser]:
    """A fresh page at 1,600 pixels; a test whose page complains fails."""
    opened = Browser(driver)
    driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    opened.size(1600)
    opened.complaints()
    yield opened
    complaints = opened.complaints()
    driver.get("about:blank")
    assert complaints == []
