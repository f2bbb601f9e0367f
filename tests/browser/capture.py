"""The README's picture: the dashboard of a running service under a load that shares prefixes.

    python -m tests.browser.capture http://127.0.0.1:8000 PICTURE.png

The requests are real: four documents, several questions on each, and some that nobody asked before, for half a minute.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.browser.conftest import FLAGS, Browser

MODEL = "smollm2-135m"
LOAD_S = 40.0
CLIENTS = 5
SENTENCE = "In the year {} the harbour of town {} was rebuilt, and {} ships came in from the north with timber and salt. "
QUESTIONS = ("Summarise the text.", "Who came to the harbour?", "What was rebuilt?", "Which year is told first?")


def document(number: int, rng: Random) -> str:
    return "".join(SENTENCE.format(1800 + 10 * number + line, number, rng.randint(2, 90)) for line in range(6 + 5 * number))


def client(url: str, seed: int, until_s: float) -> None:
    rng = Random(seed)
    documents = [document(number, Random(number)) for number in range(4)]
    while time.monotonic() < until_s:
        text = rng.choice(documents) if rng.random() < 0.8 else document(rng.randint(5, 40), rng)
        body = {
            "model": MODEL,
            "max_tokens": rng.randint(8, 40),
            "temperature": 0,
            "prompt": f"{text}\n{rng.choice(QUESTIONS)}",
        }
        headers = {"x-conductor-ttft-slo-ms": "4000", "x-conductor-tbt-slo-ms": "400"}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def main() -> None:
    url, target = sys.argv[1], Path(sys.argv[2])
    until_s = time.monotonic() + LOAD_S
    threads = [threading.Thread(target=client, args=(url, seed, until_s)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--blink-settings=preferredColorScheme=1"):
            options.add_argument(flag)
        browser = Browser(webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))))
        browser.size(1440, 1200)
        browser.open(f"{url}/dashboard")
        browser.drawn()
        time.sleep(LOAD_S - 6)
        browser.size(1440, int(str(browser.run("return document.documentElement.scrollHeight"))))
        browser.drawn()
        browser.driver.save_screenshot(str(target))
        browser.driver.quit()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
