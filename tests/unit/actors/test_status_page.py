"""The page of a run as a browser gets it: four paths, nothing from elsewhere, nothing to change."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, WITHOUT, drawn
from tests.unit.account.accounts import FULL, OPEN, WELL
from xidstream.actors.status.page import StatusPage
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import of_json
from xidstream.pipeline.errors import ConfigError, PreconditionMissing
from xidstream.pipeline.settings.addresses import host_and_port

FOLDER = Path(__file__).parents[3] / "actors" / "status" / "page"


class Served:
    def __init__(self) -> None:
        self.n_gathered = 0
        self.accounts = [FULL, WELL]
        self.page = StatusPage("127.0.0.1", 0, self.gather)
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", self.page.url)
        assert match is not None
        self.port = int(match[1])

    def gather(self) -> list[Account]:
        self.n_gathered += 1
        return self.accounts

    def ask(
        self, path: str, method: str = "GET", host: str | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response, response.read()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.page.close()


def test_the_page_and_its_files_are_there_and_forbid_all_that_is_not_theirs(served: Served) -> None:
    for path, kind in (("/", "text/html"), ("/status.js", "text/javascript"), ("/status.css", "text/css")):
        response, content = served.ask(path)
        assert response.status == 200 and str(response.getheader("Content-Type")).startswith(kind) and content
        policy = str(response.getheader("Content-Security-Policy"))
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert served.n_gathered == 0, "nobody has asked for an account"


def test_the_accounts_are_those_of_the_runs_slots_and_are_gathered_once_for_all_who_ask(
    served: Served,
) -> None:
    answers = [served.ask("/accounts.json")[1] for _ in range(5)]
    assert [of_json(json.dumps(each)) for each in json.loads(answers[0])] == [FULL, WELL]
    assert len(set(answers)) == 1 and served.n_gathered <= 2


def test_there_is_nothing_else_to_read_and_nothing_to_change(served: Served) -> None:
    for path in ("/status.html", "/../__init__.py", "/%2e%2e/__init__.py", "/accounts", "//etc/passwd"):
        assert served.ask(path)[0].status == 404, path
    for method in ("POST", "PUT", "DELETE"):
        assert served.ask("/accounts.json", method)[0].status == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("127.0.0.1", 200), ("127.0.0.1.evil.example:80", 403), ("evil.example", 403)],
)
def test_a_page_from_elsewhere_cannot_read_it_under_another_name_of_this_machine(
    served: Served, host: str, status: int
) -> None:
    assert served.ask("/accounts.json", host=host)[0].status == status


def test_the_files_name_no_other_place_and_put_no_text_in_as_html() -> None:
    files = list(FOLDER.glob("status.*"))
    assert len(files) == 3
    for file in files:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|url\(", text), file
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), file


@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_a_browser_draws_open_transactions_curves_stalls_and_what_to_do_without_an_error(
    served: Served,
) -> None:
    strange = dataclasses.replace(OPEN, tables=("public.<img src=x onerror=alert(1)>",), n_tables=1)
    served.accounts = [dataclasses.replace(FULL, open=(strange,))]
    shown = drawn(served.page.url)
    for text in (
        "The commit sequencer waits for the sink",
        "xid 749",
        "400,000 rows",
        "public.&lt;img src=x",
        "WAL held",
        "limit 1.0 GiB",
        "without the journal it would be 703.0 MiB",
        "the sink is 702.0 MiB behind",
        "not in the sink yet",
        "12,000 transactions wait for the sink, in 18 files",
        "the oldest committed 3 min 20 s ago",
        "limit 64.0 GiB",
        "payment-1",
        "3 of 8 ranges",
        "what to do: check space, permissions and reachability of the storage",
        "a whole bar is 500,000 rows",
        "120 ms in the last batch, at 01:02:03 UTC",
        " UTC</span>",
        "taken, 1 to go",
    ):
        assert text in shown, text
    assert shown.count("<path") >= 2, "curves need two answers"


def test_an_address_that_is_taken_or_is_none_is_refused(served: Served) -> None:
    with pytest.raises(PreconditionMissing, match=f"127.0.0.1:{served.port}"):
        StatusPage("127.0.0.1", served.port, list)
    assert host_and_port("[::1]:80", "status_address") == ("::1", 80)
    for text in ("127.0.0.1", "host:", ":80", "host:99999", "http://host:80"):
        with pytest.raises(ConfigError, match="status_address must be HOST:PORT"):
            host_and_port(text, "status_address")
