"""Invariant: whatever is wrong with a configuration is one line in the log, at start, that says
what to write instead; and no line holds a password.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")

import torch
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.metadata import LMCacheMetadata
from pion_lmcache import l2
from pion_lmcache.adapter import check_engine, options_of

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.backends import Backend
from integrations.lmcache.tests.servers import free_port

OWN = "remote_storage_plugin.pion."


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our loggers say. LMCache's loggers do not pass anything on to pytest's."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger(l2.logger.name)  # by now both adapters have made it
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, Listener()])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return said


def settings(url: str, **extra: Any) -> dict[str, Any]:
    made = engines.plugin(url)
    made["extra_config"] |= {name.replace("__", "."): value for name, value in extra.items()}
    return made


WRONG = {
    "an unknown option": (
        {OWN + "time_out": 3},
        "unknown option 'time_out'; did you mean 'timeout'?",
    ),
    "an option of no resemblance": ({OWN + "foo": 3}, "unknown option 'foo'; known are url, "),
    "a wrong value": (
        {OWN + "timeout": "soon"},
        "option 'timeout': Input should be a valid number",
    ),
    "a value out of range": ({OWN + "connections": 0}, "option 'connections': Input should be g"),
    "a timeout that is too long": (
        {OWN + "timeout": 9},
        "timeout 9 must be well below LMCache's blocking_timeout_secs (10)",
    ),
    "a key of no use": (
        {"remote_storage_plugins.pion.prefix": "x"},
        f"key 'remote_storage_plugins.pion.prefix' is not read; write '{OWN}prefix'",
    ),
    "another scheme": ({OWN + "url": "redis://127.0.0.1"}, "unknown URL scheme; known here: pion:"),
    "no port": ({OWN + "url": "pion://h:port"}, "the port must be a number from 1 to 65535"),
    "an unknown codec": ({OWN + "vquant": "zip"}, "vquant 'zip': unknown codec 'zip', known are"),
}


@pytest.mark.parametrize(("extra", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_option(url: str, lines: list[str], extra: dict[str, Any], sentence: str) -> None:
    made = engines.plugin(url)
    made["extra_config"] |= extra
    backend = Backend(made)
    assert backend.connector is None
    (line,) = (line for line in lines if line.startswith("ERROR"))
    assert line.startswith("ERROR Pion is NOT in use: ")
    assert sentence in line
    backend.close()


ENGINE = {
    "cachegen": ({"remote_serde": "cachegen"}, f"codec of the server with {OWN}vquant"),
    "layerwise": ({"use_layerwise": True}, "use_layerwise is not supported; set it to false"),
}


@pytest.mark.parametrize(("extra", "sentence"), ENGINE.values(), ids=ENGINE)
def test_an_engine_that_cannot_use_it(
    url: str, lines: list[str], extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        check_engine(engines.config({**engines.plugin(url), **extra}))


def test_a_codec_that_fits_no_rows(url: str, lines: list[str]) -> None:
    metadata = LMCacheMetadata(
        "a/model", 1, 1, 0, 0, torch.uint8, (1, 2, 64, 1, 16), chunk_size=64, role="worker"
    )
    backend = Backend(engines.plugin(url, vquant="fp16"), metadata)
    assert backend.connector is None
    assert "leave vquant out for this model" in lines[-1]
    backend.close()


def test_a_server_that_is_not_there(lines: list[str], connect: Any) -> None:
    port = free_port()
    backend = connect(f"pion://127.0.0.1:{port}")
    assert backend.connector is not None
    place = f"127.0.0.1:{port}"
    assert lines == [
        f"WARNING going on without Pion: ConnectionFailed: cannot reach {place}: "
        "Connection refused (more of this kind are only counted)",
        f"ERROR Pion at {place} is NOT in use until it answers (cannot reach {place}: "
        "Connection refused): start pion-server there, or correct `url`",
    ]


def test_a_server_that_is_there(url: str, lines: list[str], connect: Any) -> None:
    connect(url)
    (line,) = lines
    assert line == (
        f"INFO Pion at {url.removeprefix('pion://')} is in use; "
        "keys start with lmcache/2x4x64x32-bfloat16-exact/"
    )


def test_the_other_name_of_the_class(url: str, lines: list[str]) -> None:
    made = engines.plugin(url)
    made["extra_config"][OWN + "class_name"] = "LMCacheRemoteBackend"
    backend = Backend(made)
    keys, contents = backend.stored(1)
    assert backend.get(keys) == contents
    backend.close()


def test_a_hash_seed_that_differs_between_processes(
    url: str, lines: list[str], connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    connect(url)
    assert "start every process with PYTHONHASHSEED=0" in lines[0]


def test_no_password_in_the_log(own_pion: Any, lines: list[str], connect: Any) -> None:
    place = own_pion("--requirepass", "another").url.removeprefix("pion://")
    backend = connect(f"pion://default:hunter2@{place}")
    backend.get(backend.keys(1))
    wrong = Backend(engines.plugin("pion://default:hunter2@host:99999"))
    assert "WRONGPASS" in "".join(lines) or "WrongPass" in "".join(lines)
    assert "hunter2" not in "".join(lines)
    wrong.close()


def test_two_instances_have_options_of_their_own(url: str) -> None:
    extra = {
        OWN + "url": url,
        "remote_storage_plugin.pion.far.url": "pion://far",
        "remote_storage_plugin.pion.far.module_path": "pion_lmcache",
        "remote_storage_plugin.pion.far.timeout": "9.5",
    }
    assert options_of("pion", extra).url == url
    assert options_of("pion.far", extra).url == "pion://far"
    assert options_of("pion.far", extra).timeout == 9.5


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"utl": "pion://x"}, "adapter_params: unknown option 'utl'; did you mean 'url'?"),
        ({"url": "resp://x"}, "unknown URL scheme"),
    ],
)
def test_the_l2_adapter_refuses_at_start(
    lines: list[str], params: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match="unknown"):
        create_l2_adapter(PluginL2AdapterConfig("pion_lmcache", "PionL2Adapter", params))
    assert sentence in lines[-1]
    assert lines[-1].startswith("ERROR Pion is NOT in use: ")
