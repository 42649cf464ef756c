"""A web page cannot use a server on its user's machine."""

from __future__ import annotations

import httpx
import pytest
import servertools
from starlette.datastructures import Headers
from waiting import WAIT_S

from cookbook.server.pages import check_page
from cookbook.server.wire.bodies import Refused


@pytest.fixture(scope="module")
def url(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("pages"), names=["tiny"]) as running:
        yield running.url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "SELF"}, 200),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:1234"}, 200),
        ({"Content-Type": "application/json"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "Multipart/Form-Data; boundary=x"}, 415),
    ],
)
def test_a_page_of_another_site_is_refused(url, headers, status):
    sent = {name: url if value == "SELF" else value for name, value in headers.items()}
    response = httpx.post(f"{url}/api/v1/create_session", content=b"{}", headers=sent, timeout=WAIT_S)
    assert response.status_code == status, response.text


def test_two_hosts_are_refused():
    with pytest.raises(Refused, match="expected one header, got 2"):
        check_page(Headers(raw=[(b"host", b"127.0.0.1"), (b"host", b"evil.example")]), "127.0.0.1", has_keys=True)


def test_a_server_with_keys_answers_under_every_name_but_not_to_pages():
    check_page(Headers({"host": "gpu.example.org", "content-type": "text/plain"}), "0.0.0.0", has_keys=True)
    with pytest.raises(Refused, match="a web page of another site"):
        check_page(Headers({"host": "gpu.example.org", "origin": "https://evil.example"}), "0.0.0.0", has_keys=True)


def test_a_bearer_token_may_have_any_case(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-secret")
    with servertools.running(tiny_folder, tmp_path) as running:
        for authorization, status in (("bearer tml-secret", 200), ("BEARER tml-secret", 200), ("Basic tml-secret", 401)):
            headers = {"Authorization": authorization}
            response = httpx.get(f"{running.url}/api/v1/sessions", headers=headers, timeout=WAIT_S)
            assert response.status_code == status
