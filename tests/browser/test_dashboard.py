"""The dashboard in a real browser: what it shows, how it is used without a mouse, and how it looks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from conductor.gateway.keys import key_hash, new_key
from tests.bench.served import free_port
from tests.browser.conftest import Browser
from tests.doubles.pictures import Picture, picture
from tests.gateway.conftest import Live, StartGateway, running_gateway
from tests.gateway.test_access import A_KEY, entry, write_keys

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ADMIN_KEY = new_key()


@pytest.fixture(scope="module")
def seen() -> Picture:
    return picture()


@pytest.fixture(scope="module")
def shared(seen: Picture) -> Iterator[Live]:
    with running_gateway(dashboard_period_s=0.1) as live:
        yield live


@pytest.fixture
def live(shared: Live, seen: Picture) -> Live:
    shared.engine.reset()
    shared.engine.ready, shared.engine.picture = seen.status, seen.overview
    return shared


@pytest.fixture
def page(browser: Browser, live: Live) -> Browser:
    browser.open(f"{live.url}/dashboard")
    browser.run("localStorage.clear()")
    browser.open(f"{live.url}/dashboard")
    browser.drawn()
    return browser


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        ActionChains(browser.driver).send_keys(key).perform()


def test_every_part_shows_the_picture(page: Browser, seen: Picture) -> None:
    """Figures on the page are those of the scheduler."""
    overview = seen.overview
    assert page.text("#state-text") == "ready"
    assert "policy conductor" in page.text("#rules")
    for worker in overview["workers"]:
        assert worker in page.text("#workers")
    assert "900 ms" in page.text("#workers")
    assert len(page.all("#scatter circle")) == len(overview["estimates"])
    assert len(page.all("#prefixes tbody tr")) == len(overview["hot_prefixes"]) > 0
    assert overview["hot_prefixes"][0]["prefix"] in page.text("#prefixes")
    for kind in ("met", "missed_tbt", "rejected"):
        assert overview["objectives"][kind] > 0
        assert str(overview["objectives"][kind]) in page.text("#objectives-legend")
    assert "ttft slo" in page.text("#rejections")


def test_every_candidate_of_every_decision_has_its_three_terms(page: Browser, seen: Picture) -> None:
    """Widths are in the ratio of the terms."""
    decisions = seen.overview["decisions"]
    script = """return [...document.querySelectorAll('#decision-list li')].map(item =>
        [...item.querySelectorAll('.bar')].map(bar => [...bar.children].map(part => parseFloat(part.style.width))))"""
    drawn = page.run(script)
    assert isinstance(drawn, list)
    assert [len(bars) for bars in drawn] == [len(row.get("candidates", ())) for row in decisions]
    for bars, row in zip(drawn, decisions, strict=True):
        terms = [[one["queue_s"], one["transfer_s"], one["prefill_s"]] for one in row.get("candidates", ())]
        longest = max((sum(each) for each in terms), default=1.0)
        for widths, each in zip(bars, terms, strict=True):
            assert widths == pytest.approx([100 * term / longest for term in each], abs=0.01)


def test_the_chosen_candidate_carries_what_it_really_took(page: Browser, seen: Picture) -> None:
    row = seen.overview["decisions"][0]
    assert page.text("#decision h3") == row["request_id"]
    assert page.text("#decision .candidate.chosen .name") == row["prefill"]
    assert len(page.all("#decision .candidate")) == len(row["candidates"])
    assert len(page.all("#decision .candidate.chosen .tick")) == 1


def test_the_page_follows_what_happens(page: Browser, live: Live, seen: Picture) -> None:
    """A worker that goes, a cluster that is not ready, and one that does not answer."""
    without = {name: worker for name, worker in seen.status.workers.items() if name != "p2"}
    live.engine.ready = type(seen.status)(False, "no prefill worker", seen.status.model, without, {})
    page.until(lambda: page.text("#state-text") == "not ready: no prefill worker")
    assert "p2" not in page.text("#workers tbody tr:last-child")
    live.engine.ready = live.engine.picture = ConnectionError()
    page.until(lambda: page.text("#state-text") == "not ready: the cluster does not answer")
    assert "No worker has joined." in page.text("#workers")
    assert "No request has been decided yet." in page.text("#decisions")


def test_a_cluster_without_history_says_so(browser: Browser, live: Live) -> None:
    fresh = picture(requests=0)
    live.engine.ready, live.engine.picture = fresh.status, fresh.overview
    browser.open(f"{live.url}/dashboard")
    browser.drawn()
    for section, words in {
        "decisions": "No request has been decided yet.",
        "estimates": "No first token has been seen yet.",
        "prefixes": "No recent request reused a prefix.",
        "objectives": "Nothing was refused.",
    }.items():
        assert words in browser.text(f"#{section}")


def test_names_are_text_and_never_markup(page: Browser, live: Live, seen: Picture) -> None:
    """A worker may be called anything."""
    evil = "<img src=x onerror=document.title='owned'>"
    named = {evil if name == "p0" else name: worker for name, worker in seen.status.workers.items()}
    live.engine.ready = type(seen.status)(True, "", evil, named, {})
    page.until(lambda: evil in page.text("#workers"))
    assert page.all("#workers img") == []
    assert page.run("return document.title") == "Conductor"


def test_everything_is_reached_by_keyboard(page: Browser) -> None:
    """Tab goes through skip link, controls and the list, in this order, each with a visible mark and a name."""
    reached = []
    for _ in range(4):
        press(page, Keys.TAB)
        at_once = "const it = document.activeElement; return [it.id || it.innerText, getComputedStyle(it).outlineStyle]"
        name, outline = page.run(at_once)  # in one look: the list is drawn anew with every picture
        reached.append(name)
        assert outline != "none"
    assert reached == ["Skip to the figures", "pause", "theme", "decision-0"]


def test_arrow_keys_choose_a_decision_and_escape_lets_go(page: Browser, seen: Picture) -> None:
    """The choice and the focus survive new pictures."""
    ids = [row["request_id"] for row in seen.overview["decisions"]]
    press(page, *[Keys.TAB] * 4, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.text("#decision h3") == ids[2]
    page.drawn()
    assert page.text("#decision h3") == ids[2]
    assert page.run("return document.activeElement.dataset.id") == ids[2]
    press(page, Keys.END)
    assert page.text("#decision h3") == ids[-1]
    press(page, Keys.HOME, Keys.ARROW_UP)
    assert page.text("#decision h3") == ids[0]
    press(page, Keys.ARROW_DOWN, Keys.ESCAPE)
    assert page.text("#decision h3") == ids[0]


def test_a_choice_stays_when_newer_decisions_come(page: Browser, live: Live, seen: Picture) -> None:
    ids = [row["request_id"] for row in seen.overview["decisions"]]
    page.run("document.querySelectorAll('#decision-list li')[1].click()")
    newer = json.loads(json.dumps(seen.overview["decisions"][0])) | {"request_id": "newer"}
    live.engine.picture = seen.overview | {"decisions": [newer, *seen.overview["decisions"][:-1]]}
    page.until(lambda: page.run("return document.querySelector('#decision-list li').dataset.id") == "newer")
    assert page.text("#decision h3") == ids[1]


def test_a_pause_holds_the_page_still(page: Browser) -> None:
    press(page, "p")
    assert page.find("#pause").get_attribute("aria-pressed") == "true"
    before = page.pictures()
    page.until(lambda: page.run("return new Promise(done => setTimeout(() => done(true), 400))"))
    assert page.pictures() == before
    press(page, "p")
    page.drawn()


def test_the_theme_is_chosen_and_kept(page: Browser, live: Live) -> None:
    """By the system until somebody chooses; across visits afterwards."""

    def background() -> object:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    def system(scheme: str) -> object:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return background()

    dark, light = system("dark"), system("light")
    assert dark != light
    press(page, "t", "t")
    assert background() == dark
    page.open(f"{live.url}/dashboard")
    assert background() == dark
    press(page, "t")
    assert (page.find("#theme").text, background()) == ("Theme: auto", light)


CONTRAST = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = (c) => { const l = c.slice(0, 3).map(v => linear(v / 255));
        return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2]; };
    const behind = (node) => { for (; node; node = node.parentElement) { const c = rgb(getComputedStyle(node).backgroundColor);
        if (c[3] > 250) return c; } return [255, 255, 255, 255]; };
    const poor = [];
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
        if (!own || !node.checkVisibility() || node.closest('svg, script, style')) continue;
        const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([node.className, node.textContent, (a + 0.05) / (b + 0.05)]);
    }
    return poor;"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1600])
def test_it_is_legible_at_every_width_in_both_themes(page: Browser, width: int, theme: str) -> None:
    """Nothing sticks out to the side, no text is cut off or faint; a screenshot of each is kept."""
    press(page, *["t"] * (1 if theme == "light" else 2))
    page.size(width)
    page.drawn()
    assert page.run("return document.documentElement.scrollWidth") == width
    cut = """return [...document.querySelectorAll('main *')].filter(node => node.checkVisibility() && !node.closest('svg')
        && node.id !== 'decision-list' && !node.matches('.bar') && node.scrollWidth > node.clientWidth + 1
        && getComputedStyle(node).display !== 'inline').map(node => node.outerHTML.slice(0, 90))"""
    assert page.run(cut) == []
    assert page.find("#theme").text == f"Theme: {theme}"
    assert page.run(CONTRAST) == []
    smallest = page.run(
        "return Math.min(...[...document.querySelectorAll('main *')].map(n => parseFloat(getComputedStyle(n).fontSize)))"
    )
    assert isinstance(smallest, int | float)
    assert smallest >= 11.5
    page.screenshot(f"dashboard-{width}-{theme}")


def test_nothing_is_fetched_but_the_events(page: Browser, live: Live) -> None:
    """No script, font, style or picture from anywhere."""
    fetched = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert fetched in ([], [f"{live.url}/dashboard/events"])


def test_the_operator_s_key_opens_it_where_keys_are_asked_for(
    browser: Browser, start_gateway: StartGateway, tmp_path: Path, seen: Picture
) -> None:
    """On the admin port alone: the page asks, a tenant's key is refused, the operator's shows the picture."""
    file = write_keys(tmp_path / "keys.yaml", a=entry(A_KEY))
    keyed = start_gateway(keys_file=file, admin_port=0, admin_key=key_hash(ADMIN_KEY), dashboard_period_s=0.1)
    keyed.engine.ready, keyed.engine.picture = seen.status, seen.overview
    browser.open(f"http://127.0.0.1:{keyed.admin_port}/dashboard")
    browser.until(lambda: browser.find("#key-form").is_displayed())
    assert browser.run("return document.activeElement.id") == "key"
    press(browser, A_KEY, Keys.ENTER)
    browser.until(lambda: "not the operator's key" in browser.text("#key-problem"))
    assert browser.pictures() == 0
    press(browser, ADMIN_KEY, Keys.ENTER)
    browser.drawn()
    assert not browser.find("#key-form").is_displayed()
    assert browser.text("#state-text") == "ready"
    refused = [message for message in browser.complaints() if "401" not in message]
    assert refused == []


@contextmanager
def gateway_on(port: int, seen: Picture) -> Iterator[Live]:
    with running_gateway(port=port, dashboard_period_s=0.1) as live:
        live.engine.ready, live.engine.picture = seen.status, seen.overview
        yield live


def test_a_lost_connection_is_told_and_mended(browser: Browser, seen: Picture) -> None:
    """The gateway goes away and comes back on its port; the page needs no reload."""
    port = free_port()
    with gateway_on(port, seen) as first:
        browser.open(f"{first.url}/dashboard")
        browser.drawn()
    browser.until(lambda: "connection lost" in browser.text("#state-text"))
    with gateway_on(port, seen):
        browser.until(lambda: browser.text("#state-text") == "ready")
    browser.open("about:blank")
    browser.complaints()
