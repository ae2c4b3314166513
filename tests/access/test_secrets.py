"""Invariant: a secret opens its tenant's door and is told to nobody; a guess learns nothing from
how long it took; and no way of configuring the server leaves a door open by mistake.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pion_server import tenants as module
from pion_server.__main__ import main
from pion_server.config import MAX_SECRET, Config, TenantOptions
from pion_server.tenants import Tenants

SECRET = "hunter2-hunter2"


def options(*texts: str) -> list[TenantOptions]:
    return [TenantOptions.parse(text) for text in texts]


# -- guessing -------------------------------------------------------------------------------------

GUESSES = [
    (b"ann", b"anns"),
    (b"zoe", b"zoes"),
    (b"ann", b"wrong"),
    (b"ann", b""),
    (b"nobody", b"anns"),
    (b"", b""),
    (b"ann", b"a" * (MAX_SECRET + 1)),
    (b"n" * 100_000, memoryview(b"p" * 100_000)),
]


@pytest.mark.parametrize(("user", "password"), GUESSES)
def test_every_guess_is_compared_with_everybody_in_constant_time(
    monkeypatch: Any, user: bytes, password: bytes
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append((len(ours), len(theirs)))
        return ours == theirs

    each = Tenants(Config(tenants=options("ann:anns", "bea:beas", "zoe:zoes")))
    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    found = each.find(user, password)
    assert compared == [(128, 128)] * 3
    assert (found.name if found else None) == {b"anns": "ann", b"zoes": "zoe"}.get(
        bytes(password) if user in (b"ann", b"zoe") else b""
    )


def test_it_is_the_real_comparison() -> None:
    assert module.hmac.compare_digest is hmac.compare_digest


def test_words_are_told_apart_to_the_last_byte() -> None:
    longest = "x" * MAX_SECRET
    each = Tenants(Config(requirepass=longest))
    assert each.find(b"default", longest.encode())
    for wrong in (longest[:-1], longest + "x", longest[:-1] + "y", longest + "\0"):
        assert each.find(b"default", wrong.encode()) is None
    # Neither may the border between the two words be moved.
    assert Tenants(Config(tenants=options("ab:c"))).find(b"a", b"bc") is None


# -- telling --------------------------------------------------------------------------------------


def test_no_repr_and_no_error_shows_it() -> None:
    config = Config(requirepass=SECRET, tenants=options(f"ann:{SECRET}-2"))
    each = Tenants(config)
    shown = [repr(config), str(config), repr(config.everyone), config.model_dump_json()]
    shown += [repr(each), repr(vars(each)), *map(repr, each)]
    for wrong in (
        {"requirepass": SECRET, "port": -1},
        {"requirepass": SECRET * 100},
        {"requirepass": SECRET, "tenants": [{"name": "default", "secret": SECRET}]},
        {"tenants": [{"name": SECRET + " ", "secret": SECRET, "quota": SECRET}]},
        {"tenants": [{"name": "ann", "secret": SECRET}, {"name": "Ann", "secret": SECRET}]},
    ):
        with pytest.raises(ValidationError) as caught:
            Config(**wrong)
        shown.append(str(caught.value))
    assert not [text for text in shown if SECRET in text]


@pytest.fixture
def refused(capsys: Any) -> Callable[..., str]:
    """What pion-server says to options that it must refuse: refused("--port", "x")."""

    def run(*args: str) -> str:
        assert main(["--port", "0", *args]) == 2
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err
        return str(said.err)

    return run


REFUSED = {
    f"{SECRET}": "a tenant is name:secret",
    f"ann:{SECRET}:1mb:": "a tenant is name:secret",
    f"ann:{SECRET}:{SECRET}": "the quota cannot be used",
    f"ann:{SECRET}:-1": "the quota cannot be used",
    f"ann:{SECRET}:0": "the quota cannot be used",
    f"../ann:{SECRET}": "the name cannot be used",
    f".:{SECRET}": "the name cannot be used",
    f" :{SECRET}": "the name cannot be used",
    f"ann:{SECRET * 100}": "the secret cannot be used",
    "ann:": "the secret cannot be used",
    ":": "the name and secret cannot be used",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_tenant_that_cannot_be(text: str, tmp_path: Path, refused: Any) -> None:
    file = tmp_path / "tenants"
    file.touch(0o600)
    file.write_text(f"# who\n\nbea:beas\n{text}\n")
    places = {"--tenant number 1: ": ["--tenant", text], "line 4: ": ["--tenants", str(file)]}
    for where, args in places.items():
        said = refused(*args)
        assert where in said
        assert REFUSED[text] in said


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o644, 0o666, 0o610])
def test_a_tenants_file_that_others_can_get_at(tmp_path: Path, mode: int, refused: Any) -> None:
    file = tmp_path / "tenants"
    file.write_text(f"ann:{SECRET}\n")
    file.chmod(mode)
    said = refused("--tenants", str(file))
    assert f"others have access to {file}" in said
    assert "chmod 600" in said


def test_a_tenants_file_that_is_not_there(tmp_path: Path, refused: Any) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert f"cannot read {path}" in refused("--tenants", str(path))


def test_a_server_that_has_been_told_secrets_keeps_them(
    start_pion: Any, dial: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "tenants"
    file.touch(0o600)
    file.write_text("\n  # comment\n  alice:alices-s3cret:1mb  \nbob:bobs-s3cret\n")
    monkeypatch.setenv("PION_REQUIREPASS", SECRET)
    server = start_pion("--tenants", str(file), "--log-level", "debug")
    command_line = Path(f"/proc/{server.pid}/cmdline")
    if command_line.exists():
        assert b"s3cret" not in command_line.read_bytes()
    secrets = [b"alices-s3cret", b"bobs-s3cret", SECRET.encode()]
    asks = [["CONFIG", "GET", "*"], ["INFO"], ["CLIENT", "LIST"], ["COMMAND", "DOCS"], ["HELLO"]]
    alice = dial(server.port, "alice")
    stranger = dial(server.port)
    said = [alice.ask(*words) for words in asks]
    said += [raw.ask("AUTH", "alice", SECRET) for raw in (alice, stranger)]
    said.append(stranger.ask("HELLO", "3", "AUTH", "bob", "alices-s3cret"))
    said.append(stranger.ask("HELLO", "3", "AUTH", "bob", "bobs-s3cret", "FOO"))
    assert stranger.ask("AUTH", SECRET) == b"+OK\r\n"
    told = b"".join(said) + server.log.read_bytes()
    assert not [secret for secret in secrets if secret in told]
    assert not [name for name in (b"bob", b"default") if name in alice.ask("CLIENT", "LIST")]


# -- open doors -----------------------------------------------------------------------------------

OPEN = {
    "no lock": (["--host", "0.0.0.0"], {}, "refusing to listen"),
    "empty": (["--host", "0.0.0.0", "--requirepass", ""], {}, "--requirepass: a password has 1"),
    "empty, at home": (["--requirepass", ""], {}, "--requirepass: a password has 1"),
    "empty variable": ([], {"PION_REQUIREPASS": ""}, "--requirepass: a password has 1"),
    "twice": (["--tenant", "a:b", "--tenant", "A:c"], {}, "tenant a is given twice"),
    "default": (["--requirepass", "x", "--tenant", "default:y"], {}, "default is given twice"),
    "quotas": (["--max-memory", "1mb", "--tenant", "a:b:2mb"], {}, "--max-memory"),
    "nothing left": (
        ["--max-memory", "1mb", "--tenant", "a:b:1mb", "--tenant", "c:d"],
        {},
        "leave 0 bytes of --max-memory",
    ),
    "no seat": (["--tenant", "a:b", "--tenant", "c:d", "--maxclients", "1"], {}, "--maxclients"),
    "half a certificate": (["--tls-cert", "x"], {}, "--tls-cert and --tls-key"),
    "authority alone": (["--tls-ca", "x"], {}, "--tls-ca goes with"),
}


@pytest.mark.parametrize("case", OPEN)
def test_a_configuration_that_would_not_hold(case: str, refused: Any, monkeypatch: Any) -> None:
    args, env, words = OPEN[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert words in refused(*args)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.168.1.1", ""])
def test_a_lock_of_any_kind_opens_the_world(host: str) -> None:
    with pytest.raises(ValidationError, match="without a password"):
        Config(host=host)
    assert Config(host=host, requirepass="x").locked
    assert Config(host=host, tenants=options("ann:x")).locked
