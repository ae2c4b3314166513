"""Every family of mlx-lm goes on from a restored cache as its writer did, bit for bit."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import mlx_lm.models
import pytest
from families import FAMILIES, LEFT_OUT, ships
from survey import SHORTER, row, survey, table

PAGE = Path(__file__).parents[3] / "docs" / "MODELS.md"
# One family for each combination of cache classes, and the odd ones.
SOME = [
    "afm7",
    "baichuan_m1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma3n",
    "gemma4",
    "gpt_oss",
    "iquestloopcoder",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "longcat_flash",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "deepseek_v41",
    "nemotron-nas",
    "nemotron_h",
    "plamo2",
    "qwen3",
    "qwen3_5",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
]


def assert_equal(families: list[str]) -> None:
    different = {}
    for family, (written, restored) in survey(families).items():
        assert set(written) == {"exact", "end", "boundary", "length", "slid"}
        assert 0 < written["length"] <= SHORTER
        assert all(dropped == windows for dropped, windows in written["slid"]), family
        if written != restored:
            different[family] = (written, restored)
    assert different == {}


def test_some_families() -> None:
    assert_equal([family for family in SOME if ships(family)])


@pytest.mark.long
def test_every_family() -> None:
    assert_equal([family for family in FAMILIES if ships(family)])


def test_no_family_is_forgotten() -> None:
    helpers = {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
    shipped = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    assert shipped - helpers <= set(FAMILIES) | set(LEFT_OUT)
    assert len(FAMILIES) >= 60


def test_the_page_says_what_is() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [row(family) in page for family in SOME] == [True] * len(SOME)
    assert [line for line in page if line.startswith("| `")] == [
        line for family in FAMILIES for line in page if line.startswith(f"| `{family}`")
    ]


@pytest.mark.long
def test_the_whole_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == table()
