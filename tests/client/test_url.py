"""Invariant: a URL means one endpoint or is refused in words that name what to change, and a
password in it is shown nowhere.
"""

from __future__ import annotations

import ssl

import pytest

from pion_server.client import AsyncClient, Client, PionError
from pion_server.client.url import Endpoint, Tcp, Unix, parse_url
from pion_server.wire.lanes import FAST

GOOD = {
    "pion://": Endpoint(Tcp("127.0.0.1", 1974)),
    "pion://example": Endpoint(Tcp("example", 1974)),
    "pion://example/": Endpoint(Tcp("example", 1974)),
    "PION://Example:7": Endpoint(Tcp("example", 7)),
    "pion://:7": Endpoint(Tcp("127.0.0.1", 7)),
    "pion:///3": Endpoint(Tcp("127.0.0.1", 1974), db=3),
    "pion://example:7/15": Endpoint(Tcp("example", 7), db=15),
    "pion://[::1]": Endpoint(Tcp("::1", 1974)),
    "pion://[::1]:7/1": Endpoint(Tcp("::1", 7), db=1),
    "pion://[fe80::1%25eth0]:7": Endpoint(Tcp("fe80::1%eth0", 7)),
    "pion://:secret@example": Endpoint(Tcp("example", 1974), password="secret"),
    "pion://ann:secret@example": Endpoint(Tcp("example", 1974), "ann", "secret"),
    "pion+fast://h": Endpoint(Tcp("h", 1975, lane=FAST)),
    "pion+fast://ann:secret@[::1]:7/2": Endpoint(Tcp("::1", 7, lane=FAST), "ann", "secret", 2),
    "pion+unix:///run/pi%20on.sock": Endpoint(Unix("/run/pi on.sock")),
    "pion+unix://ann:secret@/run/p": Endpoint(Unix("/run/p"), "ann", "secret"),
    "pion://a%40b:p%2Fw%3A%25%E2%82%AC@h:7/2": Endpoint(Tcp("h", 7), "a@b", "p/w:%\u20ac", 2),
}
BAD = {
    "": "unknown URL scheme",
    "127.0.0.1:1974": "unknown URL scheme",
    "redis://127.0.0.1": "unknown URL scheme",
    "pion://h:0": "port must be",
    "pion://h:65536": "port must be",
    "pion://h:-1": "port must be",
    "pion://h:seven": "port must be",
    "pion://ann:pa/ss@h": "port must be",
    "pion://ann:pa/123@h:99999": "port must be",
    "pion://ann:12/ss@h": "number of a db",
    "pion://ann:12#ss@h": "no ? or #",
    "pion://h?timeout=1": "no ? or #",
    "pion://h#x": "no ? or #",
    "pion://h/name": "number of a db",
    "pion://h/-1": "number of a db",
    "pion://h/1/2": "number of a db",
    "pion://h/\u0661": "number of a db",
    "pions://h:0": "port must be",
    "pions://h#x": "no ? or #",
    "pions://ann:12?ss@h": "behind ? come",
    "pions://h?ss@h": "behind ? come ca=..., cert=..., key=..., each once",
    "pions://h?ca=": "behind ? come",
    "pions://h?ca=p[w&ca=p[w": "behind ? come",
    "pions://h?verify=none": "behind ? come",
    "pions://h?key=ss@": "key=... goes with cert=",
    "pions://h?ca=ss@": "the URL names a file that is of no use: No such file",
    "pion://ann@h": "user without a password",
    "pion://ann:@h": "user without a password",
    "pion+fast://h:0": "port must be",
    "pion+unix://run/pion": "a path behind three slashes",
    "pion+unix://ann:ss@h/run/p": "a path behind three slashes",
    "pion+unix://": "a path behind three slashes",
    "pion+unix:///run/p?ss": "no ? or #",
    "pion+unix://ann@/run/p": "user without a password",
    "pion://[::1": "not a valid URL",
    "pion://ann:p[w@h": "not a valid URL",
}


@pytest.mark.parametrize("url", GOOD)
def test_a_url_names_one_endpoint(url: str) -> None:
    assert parse_url(url) == GOOD[url]


def test_tls_is_a_scheme_and_checks_what_it_talks_to() -> None:
    for url in ("pions://ann:secret@h:7/2", "PIONS://ann:secret@h:7/2"):
        endpoint = parse_url(url)
        assert endpoint == Endpoint(Tcp("h", 7), "ann", "secret", 2)
        assert endpoint.place.tls is not None
        assert endpoint.place.tls.verify_mode is ssl.CERT_REQUIRED
        assert endpoint.place.tls.check_hostname
    assert parse_url("pion://h").place.tls is None
    fast = parse_url("pions+fast://h").place
    assert fast.tls is not None
    assert fast.lane is FAST


@pytest.mark.parametrize("url", BAD)
def test_a_refusal_says_what_is_wrong_and_quotes_nothing(url: str) -> None:
    with pytest.raises(PionError, match=BAD[url].replace("?", r"\?")) as caught:
        parse_url(url)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for part in ("ann", "pa/", "ss@", "12", "p[w"):
        assert part not in str(caught.value)


@pytest.mark.parametrize("make", [Client, AsyncClient, parse_url])
def test_a_password_is_in_no_repr(make: type) -> None:
    made = make("pion://ann:s3cr3t@example:7/2")
    for shown in (repr(made), str(made), f"{made}"):
        assert "s3cr3t" not in shown
        assert "example" in shown


def test_a_place_reads_as_people_write_it() -> None:
    assert str(Tcp("::1", 7)) == "[::1]:7"
    assert str(Tcp("example", 7)) == "example:7"
