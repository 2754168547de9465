"""The browser of the tests of the page. A module that opens pages has a fixture `server` of its own."""

import pytest
from chromium import Chromium


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@pytest.fixture
def open_page(server, browser):
    """Opens a page, and checks at the end that it asked only the server, and that nothing went wrong in it."""
    pages = []

    def open_it(url=None, problems=(), **options):
        page = browser.page(f"{url or server.url}/", **options)
        pages.append((page, url or server.url, problems))
        return page

    yield open_it
    for page, url, problems in pages:
        page.run("1")  # takes in the last events
        assert all(each.startswith((f"{url}/", "data:image/svg")) for each in page.requested), page.requested
        assert [text for text in page.problems if not any(each in text for each in problems)] == []
