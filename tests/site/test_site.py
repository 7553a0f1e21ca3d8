"""The documentation site, built from the pages of this repository and opened from disk in a browser."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tests.support import builds
from tests.support.browser import launch_chromium

pytestmark = pytest.mark.extended

PAGES = [
    "index.html",
    "docs/tutorial.html",
    "docs/guarantees/redis.html",
    "docs/reference/cli.html",
    "python/blocking.html",
]


@pytest.fixture(scope="module")
def site():
    """The folder of the built version."""
    [version] = builds.site().glob("*/index.html")
    return version.parent


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as found:
        yield found


def problems_of(page) -> list[str]:
    """Fills with errors of the console, which include missing files, and with requests to other machines."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: request.url.startswith("file:") or found.append(request.url))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_asks_for_nothing_elsewhere(site, browser, scheme) -> None:
    for name in PAGES:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        problems = problems_of(page)
        page.goto((site / name).as_uri())
        page.wait_for_load_state("networkidle")
        assert (name, page.evaluate("document.documentElement.scrollWidth"), problems) == (name, 390, [])
        page.close()


def test_search_works_without_a_server(site, browser) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=zombie")
    page.wait_for_selector("ul.search a")
    assert page.locator("ul.search a").count() > 0
    page.close()


def test_menu_offers_the_versions_beside_this_one(site, browser) -> None:
    def answer(route) -> None:
        route.fulfill(body=f'window.LEASEHOLD_VERSIONS = ["9.0.0", "{site.name}"];', content_type="text/javascript")

    assert (site.parent / "versions.js").read_text() == f'window.LEASEHOLD_VERSIONS = ["{site.name}"];\n'
    page = browser.new_page()
    page.route("**/versions.js", answer)
    page.goto((site / "docs" / "tutorial.html").as_uri())
    assert page.locator("select.versions").input_value() == site.name
    assert page.locator("select.versions option").all_text_contents() == ["9.0.0", site.name]
    page.close()


def test_web_server_leads_to_the_same_page_of_another_version(site, browser) -> None:
    def answer(route) -> None:
        path = urlsplit(route.request.url).path
        file = site.parent / path.lstrip("/").replace("9.0.0", site.name)
        if path == "/versions.js":
            route.fulfill(body=f'window.LEASEHOLD_VERSIONS = ["9.0.0", "{site.name}"];', content_type="text/javascript")
        elif path == "/9.0.0/docs/concepts.html" or not file.is_file():
            route.fulfill(status=404, path=site.parent / "404.html")
        else:
            route.fulfill(path=file)

    page = browser.new_page()
    page.route("http://leasehold.test/**", answer)
    for name, leads_to in {"docs/tutorial.html": "docs/tutorial.html", "docs/concepts.html": "index.html"}.items():
        page.goto(f"http://leasehold.test/{site.name}/{name}")
        page.select_option("select.versions", "9.0.0")
        page.wait_for_url(f"http://leasehold.test/9.0.0/{leads_to}")
    page.goto(f"http://leasehold.test/{site.name}/docs/no-such-page.html")
    page.get_by_role("link", name="first page").click()
    page.wait_for_url(f"http://leasehold.test/{site.name}/index.html")
    page.close()


def test_dashes_before_a_command_stay_two_in_tables(site) -> None:
    assert "leasehold run NAME -- true" in (site / "docs" / "speed.html").read_text()


def test_api_pages_have_every_public_name(site) -> None:
    import leasehold

    text = "".join(path.read_text() for path in (site / "python").glob("*.html"))
    packages = {"fences", "telemetry", "versioned"}
    assert [name for name in leasehold.__all__ if name not in packages and f'id="leasehold.{name}"' not in text] == []
