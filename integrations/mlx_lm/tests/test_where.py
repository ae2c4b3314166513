"""A prompt cache reaches its server by every way in that the client knows, and is told once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
import trustme
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.processes import child, free_port

from pion_server.client import Client
from pion_server.errors import ConnectionFailed, DeadlineExceeded, PionError

Tiny = Callable[..., nn.Module]

IDS = list(range(40))


@contextmanager
def listening(url: str, *options: str) -> Iterator[str]:
    """A pion-server with `options`, as soon as it answers at `url`, which is yielded."""
    with child("pion_server", "--log-level", "warning", *options) as process, Client(url) as client:
        give_up = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except (ConnectionFailed, DeadlineExceeded):
                assert process.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.05)
        yield url


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """One server's URLs: over TLS with a user, and a Unix socket with the same."""
    with tempfile.TemporaryDirectory(prefix="pion-") as folder:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            f"{folder}/cert.pem"
        )
        secrets = Path(folder, "tenants")
        secrets.write_text("ann:s3cret\n")
        secrets.chmod(0o600)
        port = free_port()
        options = {
            "--port": port,
            "--tenants": secrets,
            "--unixsocket": f"{folder}/socket",
            "--tls-cert": f"{folder}/cert.pem",
            "--tls-key": f"{folder}/cert.pem",
        }
        tls = f"pions://ann:s3cret@127.0.0.1:{port}?ca={folder}/ca.pem"
        with listening(tls, *(str(word) for pair in options.items() for word in pair)):
            yield {"tls": tls, "unix": f"pion+unix://ann:s3cret@{folder}/socket"}


@pytest.mark.parametrize("stage2", [False, True])
@pytest.mark.parametrize("way", ["tls", "unix"])
def test_a_prefix_comes_back(
    tiny: Tiny, urls: dict[str, str], way: str, stage2: bool, namespace: str
) -> None:
    model = tiny("llama")
    options: dict[str, Any] = {"url": urls[way], "stage2": stage2, "timeout": 30}
    for hits in (0, 1):
        with PionPromptCache(model, **options) as pion:
            assert pion.get_or_prefill(IDS, namespace=namespace)[0].offset == len(IDS)
            assert pion.flush()
            assert pion.lookup(namespace)
            assert (pion.stats()["hits"], pion.stats()["errors"]) == (hits, {})


@pytest.mark.parametrize(
    "also", [{"host": "127.0.0.1"}, {"port": 1974}, {"username": "ann"}, {"password": "s3cret"}]
)
def test_a_url_says_it_all(tiny: Tiny, also: dict[str, Any]) -> None:
    (name,) = also
    with pytest.raises(ValueError, match=f"leave out {name}$"):
        PionPromptCache(tiny("llama"), url="pion://h", **also)


@pytest.mark.parametrize(
    "options",
    [{"url": ""}, {"url": "http://h"}, {"url": "pion://:s3cret@h:x"}, {"username": "ann"}],
)
def test_what_is_no_place_is_the_callers_mistake(tiny: Tiny, options: dict[str, Any]) -> None:
    with pytest.raises(PionError) as caught:
        PionPromptCache(tiny("llama"), **options)
    assert "s3cret" not in str(caught.value)
