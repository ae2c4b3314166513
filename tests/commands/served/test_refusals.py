"""Invariant: what cannot be carried out is refused in words that the command's entry documents,
leaves every stored byte as it was, and the connection goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from pion_server.commands import reference
from pion_server.commands.registry import TABLE

Words: TypeAlias = tuple[bytes | str | int, ...]

reference.load_families()
LONG = b"x" * (1 << 20)
HASHES = b"\1" * 16
ROW = b"\0" * 8  # of dim 2 in fp32
HEX = "00ff"

OTHER = "00fe"

# NS is a namespace of two layers and four tokens in fp32 with dim 2 and fingerprint HEX, and a
# recurrent state; NARROW, which goes on from it, has a schema of one layer and one row; SID is a
# session whose layer 0 has four rows; NEW is nobody's.
NS, NARROW, SID, NEW = b"refusals\xff\0\r\n", b"narrow", b"refusals-sid", b"refusals-new"
# OPEN is declared, and no row of it is there; PART is not, and has two rows on the K side.
OPEN, PART = b"refusals-open", b"refusals-part"
KV, SSM = "KV.PREFIX.", "SSM.PREFIX."
REGISTER: Words = (KV + "REGISTER", NEW, 2, "fp32")
SCHEMA: Words = (KV + "REGISTER.SCHEMA", NEW, "K", 1, "fmt=fp32,dim=2", "V", 1, "fmt=fp32,dim=2")
STORE: Words = (KV + "STORE", NS, 0, 1)
PUT: Words = ("V.STOREBATCH", SID, 0, 0, 1)

# Attention state: ATT has layer 0 of 2 K/V heads, 3 tokens and D = 2; layer 0 of COLD is cold. A
# query of 4 heads, its suffix of one token, and a head map.
AP, ATT, COLD = "ATTEND.PREFIX.", b"refusals-att", b"refusals-cold"
Q, SUF, MAP, KV3 = b"\0" * 32, b"\0" * 16, b"\0\0\1\1", b"\0" * 48
IDS, COUNTS = b"\0" * 32, b"\2\0\0\0" * 4
ATTEND_STORE: Words = (AP + "STORE", NEW, 0, 2, 3, 2)
QUERY: Words = (AP + "QUERY", ATT, 0, 4, 2, 0)
FUSED: Words = (AP + "QUERY_FUSED", ATT, 0, 4, 2, 1, 2)
SPARSE: Words = (AP + "QUERY_SPARSE", ATT, 0, 4, 2, 2)
AUTO: Words = (AP + "QUERY_SPARSE_AUTO", ATT, 0, 4, 2, 1, 2, 2)
AUTO_FUSED: Words = (AP + "QUERY_SPARSE_AUTO_FUSED", ATT, 0, 4, 2, 1, 2, 2, 1)
BATCH: Words = ("ATTEND.QUERYBATCH", 2, 3, 2, 0)
WARM: Words = (KV + "WARM", NS, 1, 2)
# An index: NS itself is none that one could add to, as its rows have another size.
IX_STORE: Words = ("KV.STORE", NEW, 0, 0, 1)
IX_APPEND: Words = ("ATTEND.STORE", NEW, 0, 1, 1, 2)
IX_QUERY: Words = ("ATTEND.QUERY", NS, 0, 1, 2, 0)
INDEX: list[Words] = [
    (*IX_STORE, ROW, ROW),
    (*IX_APPEND, ROW, ROW),
    (*IX_QUERY, ROW),
    ("KV.FETCH", NS, 0, 0, 1),
    ("KV.INFO", NS),
]
WHOLE: list[Words] = [
    (*ATTEND_STORE, KV3, KV3),
    (*QUERY, Q),
    (*FUSED, Q, SUF, SUF, MAP),
    (*SPARSE, Q, IDS, COUNTS),
    (*AUTO, Q, MAP),
    (*AUTO_FUSED, Q, SUF, SUF, MAP),
    (*BATCH, SUF, KV3, KV3),
]
# Of these in that order: how many words follow the command's name and its session and layer.
NUMBERS_AT = {AP + "STORE": 3, AP + "QUERY": 3, AP + "QUERY_FUSED": 4, AP + "QUERY_SPARSE": 3}
NUMBERS_AT |= {AP + "QUERY_SPARSE_AUTO": 5, AP + "QUERY_SPARSE_AUTO_FUSED": 6}


def with_word(words: Words, at: int, word: bytes | str | int) -> Words:
    return (*words[:at], word, *words[at + 1 :])


def of(name: bytes, layer: int = 0) -> list[Words]:
    """Every query of another state."""
    return [(words[0], name, layer, *words[3:]) for words in WHOLE[1:-1]]


NOT_A_NUMBER: list[bytes | str | int] = [
    *["", "x", "+1", "01", "-0", "1.5", " 1", "1 ", "1_0", "\n1", "0x1", "1e0"],
    *[-1, 2**31 + 1, 2**63, 2**64, 10**30, b"\xff", LONG],
]


def lacking(*words: Any) -> list[Words]:
    """A command and every shorter form of it, its name alone as the last one."""
    return [words[:end] for end in range(len(words) - 1, 0, -1)]


REFUSED: list[tuple[str, list[Words]]] = [
    # Arity, names
    (
        "wrong number of arguments|.* is missing|DATA takes",
        [
            *lacking("V.CREATE", NEW, 2),
            *lacking("V.CREATE", NEW, 0, "SCHEMA", 1, "fmt=fp32,dim=2"),
            *lacking(*PUT, ROW),
            *lacking("V.FETCH", SID, 0, "RANGE", 0, 1),
            *lacking("V.FETCH", SID, "BATCH", 0, 1, 1),
            *lacking(*SCHEMA),
            *lacking(*REGISTER),
            *lacking(*STORE, "DATA", ROW, ROW)[1:],
            *lacking(KV + "LOOKUP", NS),
            *lacking(KV + "MATCH", 1, NS),
            *lacking(KV + "FETCH", NS),
            *lacking(KV + "DROP", NS),
            *lacking(KV + "BLOCKS", NS),
            *lacking(KV + "MEMBERSHIP", NS, 2, HASHES),
            *lacking(SSM + "STORE", NS, 0, ROW)[1:],
            *lacking(SSM + "FETCH", NS, 0)[1:],
            (SSM + "DROP",),
            *[each for words in (*WHOLE, *INDEX) for each in lacking(*words)],
            *lacking(*WARM),
            *lacking(AP + "LOOKUP", ATT, 0),
            (*REGISTER, "PARENT"),
            (KV + "MATCH", 3, NS, NS),
            (KV + "INFO", "x"),
            (KV + "BLOCKS", NS, NS),
            (KV + "MEMBERSHIP", NS, 2, HASHES, 1),
            (*REGISTER, "LAYERS"),
            (*REGISTER, "BLOCKS", 64, 2),
            (KV + "FETCH", NS, "RANGE", 0),
        ],
    ),
    (
        "(session id|namespace) must be 1 to 4096 bytes long",
        [
            words
            for name in (b"", b"x" * 4097, LONG)
            for words in [
                ("V.CREATE", name, 2),
                ("V.STOREBATCH", name, 0, 0, 1, ROW),
                ("V.FETCH", name, 0, 0),
                (KV + "REGISTER", name, 2, "fp32"),
                (KV + "REGISTER.SCHEMA", name, *SCHEMA[2:]),
                (KV + "LOOKUP", name),
                (KV + "MATCH", 2, NS, name),
                (KV + "STORE", name, 0, 1, "DATA", ROW, ROW),
                (KV + "FETCH", name),
                (KV + "DROP", NS, name),
                (KV + "BLOCKS", name),
                (KV + "MEMBERSHIP", name, 2, HASHES),
                (SSM + "STORE", name, 0, ROW),
                (SSM + "FETCH", name, 0),
                (SSM + "DROP", name),
                (KV + "WARM", name, 1, 2),
                (*WARM, name),
                (AP + "LOOKUP", name, 0),
                (*ATTEND_STORE[:1], name, *ATTEND_STORE[2:], KV3, KV3),
                *of(name),
                *[with_word(words, 1, name) for words in INDEX],
            ]
        ],
    ),
    (
        "PARENT must be 1 to 4096 bytes long",
        [(*REGISTER, "PARENT", b""), (*SCHEMA, "PARENT", LONG)],
    ),
    # Numbers
    (
        ".* must be",
        [
            words
            for number in NOT_A_NUMBER
            for words in [
                ("V.CREATE", NEW, number),
                ("V.CREATE", NEW, 0, "SCHEMA", number, "fmt=fp32,dim=2"),
                ("V.STOREBATCH", SID, number, 0, 1, ROW),
                ("V.STOREBATCH", SID, 0, number, 1, ROW),
                ("V.STOREBATCH", SID, 0, 0, number, ROW),
                ("V.FETCH", SID, number, 0),
                ("V.FETCH", SID, 0, 0, number),
                ("V.FETCH", SID, 0, "RANGE", number, 4),
                ("V.FETCH", SID, "BATCH", 0, 1, number),
                (KV + "REGISTER", NEW, number, "fp32"),
                (*REGISTER, "LAYERS", number, "TOKENS", 4),
                (*REGISTER, "LAYERS", 2, "TOKENS", number),
                (*REGISTER, "BLOCKS", 64, number, HASHES),
                (KV + "LOOKUP", NS, "TOKENS", number),
                (KV + "MATCH", number, NS),
                (KV + "STORE", NS, number, 1, "DATA", ROW, ROW),
                (KV + "STORE", NS, 0, number, "DATA", ROW, ROW),
                (KV + "STORE", NS, 0, 1, "LAYERS", number, 1, "DATA", ROW, ROW),
                (KV + "FETCH", NS, "LAYERS", 0, number),
                (KV + "FETCH", NS, "RANGE", 0, number),
                (KV + "MEMBERSHIP", NS, number, HASHES),
                (SSM + "STORE", NS, number, ROW),
                (SSM + "FETCH", NS, number),
                (SSM + "DROP", NS, number),
                *[
                    with_word(words, at, number)
                    for words in WHOLE[:-1]
                    for at in range(2, 3 + NUMBERS_AT[str(words[0])])
                ],
                *[with_word((*BATCH, SUF, KV3, KV3), at, number) for at in range(1, 5)],
                *[(*words, number) for words in WHOLE[1:-1]],  # fa_window
                with_word(WARM, 2, number),
                with_word(WARM, 3, number),
                (AP + "LOOKUP", ATT, number),
                *[with_word(words, 2, number) for words in INDEX[:-1]],
                *[with_word(words, at, number) for words in INDEX[:-1] for at in (3, 4)],
            ]
            if (words[-2:], number) != (("BATCH", 0), 0)
        ],
    ),
    (
        ".* must be",
        [
            *[("V.CREATE", NEW, dim) for dim in ((1 << 20) + 1, 1 << 31)],
            *[
                (*REGISTER, "PREFILL_MS", ms)
                for ms in ("", "-1", "nan", "inf", "1e10", "1_0", " 1")
            ],
            *[(KV + "LOOKUP", NS, "PREFILL_MS", ms) for ms in ("x", "-0", "1e999", "0x1", "1.")],
            *[
                (*REGISTER, "FINGERPRINT", digits)
                for digits in ("", "0", "0 0f", "xy", "00" * 65, "é")
            ],
            *[(*REGISTER, "BLOCKS", size, 2, HASHES) for size in (0, -1, 2**32)],
            *[(*REGISTER, "BLOCKS", 64, count, HASHES) for count in (0, 1, 3, 2**20 + 1)],
            *[(KV + "MEMBERSHIP", NS, count, HASHES) for count in (0, 1, 3, 2**20 + 1)],
            *[(*REGISTER, *option) for option in (("LAYERS", 0, "TOKENS", 1),)],
            (*REGISTER, "LAYERS", 1, "TOKENS", 0),
            ("V.CREATE", NEW, 0, "SCHEMA", 1, "fmt=fp32,dim=0"),
            ("V.CREATE", NEW, 0, "SCHEMA", 1, f"fmt=fp32,dim={(1 << 20) + 1}"),
            ("V.FETCH", SID, "BATCH", 0, 1, 0),
            ("V.FETCH", SID, 4096, 0),
            (KV + "MATCH", 0, NS),
            (KV + "REGISTER", NEW, 2, LONG),
            (SSM + "STORE", NS, 4096, ROW),
            (AP + "LOOKUP", ATT, 4096),
            *[with_word((*ATTEND_STORE, KV3, KV3), at, 0) for at in (3, 4, 5)],
            (*with_word(ATTEND_STORE, 3, 257), KV3, KV3),
            *[with_word((*FUSED, Q, SUF, SUF, MAP), at, 0) for at in (3, 4, 5, 6)],
            *[with_word((*AUTO, Q, MAP), at, 0) for at in (5, 6, 7)],
            *[(*words, 0) for words in WHOLE[1:-1]],
            *[(*QUERY, blob) for blob in (b"", Q[:-1], Q + b"\0", LONG[:-1])],
            (*FUSED, b"", SUF, SUF, MAP),
            (*BATCH, b"", KV3, KV3),
            with_word(WARM, 2, 0),
            with_word(WARM, 3, 0),
        ],
    ),
    # Options
    (
        "unknown option",
        [
            ("V.CREATE", NEW, 2, "FMT", "fp32"),
            (*PUT, ROW, "LAYERS", 0, 1),
            ("V.FETCH", SID, 0, "RANGE", 0, 1, "VQUANT", "fp32"),
            ("V.FETCH", SID, "BATCH", 0, 1, 1, "RANGE", 0, 1),
            (*REGISTER, "TOKEN", 4),
            (*SCHEMA, ""),
            (KV + "LOOKUP", NS, "LAYERS", 2),
            (KV + "MATCH", 1, NS, SID),
            (KV + "FETCH", NS, "TOKENS", 4),
            (KV + "FETCH", NS, "FMT", "FP32", "x"),
        ],
    ),
    (
        "option .* is given twice",
        [
            ("V.CREATE", NEW, 2, "VQUANT", "fp32", "vquant", "fp32"),
            (*PUT, ROW, "FMT", "FP32", "FMT", "FP32"),
            ("V.FETCH", SID, 0, "RANGE", 0, 1, "FMT", "FP32", "fmt", "FP16"),
            (*REGISTER, "LAYERS", 2, "TOKENS", 4, "LAYERS", 2),
            (*REGISTER, "FINGERPRINT", HEX, "FINGERPRINT", HEX),
            (KV + "LOOKUP", NS, "TOKENS", 4, "TOKENS", 4),
            (KV + "MATCH", 1, NS, "FINGERPRINT", HEX, "FINGERPRINT", HEX),
            (KV + "FETCH", NS, "RANGE", 0, 1, "RANGE", 0, 1),
        ],
    ),
    (
        "expected LAYERS, FMT, FINGERPRINT or DATA, each once",
        [
            (*STORE, "FMT", "FP32", "FMT", "FP32", "DATA", ROW, ROW),
            (*STORE, "LAYERS", 0, 1, "LAYERS", 0, 1, "DATA", ROW, ROW),
            (*STORE, "TOKENS", 4, "DATA", ROW, ROW),
        ],
    ),
    (
        "unknown FMT",
        [
            (*PUT, ROW, "FMT", "fp8"),
            (*STORE, "FMT", "", "DATA", ROW, ROW),
            ("V.FETCH", SID, 0, "RANGE", 0, 1, "FMT", "int8"),
            (KV + "FETCH", NS, "FMT", "fp64"),
        ],
    ),
    (
        "unexpected argument",
        [
            ("V.CREATE", NEW, 0, "SCHEMA", 1, "fmt=fp32,dim=2", "VQUANT"),
            (SSM + "DROP", NS, 0, 0),
            *[(*words, 1, 1) for words in WHOLE[1:-1]],
            (*WARM, SID, SID),
        ],
    ),
    ("unexpected argument", [("PION.STATS", "RESET", "RESET")]),
    ("PION.STATS takes nothing, or RESET", [("PION.STATS", "x"), ("PION.STATS", b"\0")]),
    (
        ".* is half-open and needs start < end",
        [
            ("V.FETCH", SID, 0, "RANGE", 1, 1),
            ("V.FETCH", SID, 0, "RANGE", 4, 0),
            ("V.FETCH", SID, "BATCH", 2, 1, 1),
            (KV + "FETCH", NS, "LAYERS", 1, 1),
            (KV + "FETCH", NS, "RANGE", 3, 2),
            (*STORE, "LAYERS", 1, 0, "DATA", ROW, ROW),
        ],
    ),
    # Layouts
    (
        "unknown codec",
        [
            ("V.CREATE", NEW, 2, "VQUANT", "int4"),
            ("V.CREATE", NEW, 0, "SCHEMA", 1, "fmt=fp32=,dim=2"),
            (KV + "REGISTER", NEW, 2, "FMT"),
            (*SCHEMA[:-1], "fmt=fp99,dim=2"),
        ],
    ),
    (
        "a schema word reads",
        [
            (*SCHEMA[:-1], "fmt=fp32"),
            *[
                ("V.CREATE", NEW, 0, "SCHEMA", 1, word)
                for word in (
                    "",
                    "fp32",
                    "fmt=fp32",
                    "fmt=fp32,dim=2,",
                    f"fmt=fp32,dim={10**30}",
                    "fmt=fp32,dim=-2",
                    "fmt=fp32,dim=2,dim=2",
                    "fmt=,dim=2",
                    "fmt=fp32;dim=2",
                    "fmt=fp32,dim=",
                    "dim=2,fmt",
                )
            ],
        ],
    ),
    ("dim 0 must be followed by SCHEMA", [("V.CREATE", NEW, 0, "VQUANT", "fp32")]),
    (
        "it exists with another layout",
        [
            ("V.CREATE", SID, 3, "VQUANT", "fp32"),
            ("V.CREATE", SID, 2),
            (KV + "REGISTER", NS, 3, "fp32"),
            (KV + "REGISTER", NS, 2, "fp16"),
            (KV + "REGISTER.SCHEMA", NS, *SCHEMA[2:]),
        ],
    ),
    (
        "LAYERS and TOKENS declare a complete prefix only together",
        [(*REGISTER, "LAYERS", 2), (*REGISTER, "TOKENS", 2), (*SCHEMA, "LAYERS", 1)],
    ),
    (
        "the PARENT is this namespace itself, or goes on from it",
        [
            (*REGISTER, "PARENT", NEW),
            (*SCHEMA, "PARENT", NEW),
            (KV + "REGISTER", NS, 2, "fp32", "PARENT", NARROW),
        ],
    ),
    ("LAYERS is more than", [(*SCHEMA, "LAYERS", 2, "TOKENS", 4)]),
    (
        "K and V must have the same number of layers",
        [(*SCHEMA[:-2], 2, "fmt=fp32,dim=2", "fmt=fp32,dim=2")],
    ),
    (
        "-MISMATCH ",
        [
            (KV + "REGISTER", NS, 2, "fp32", "FINGERPRINT", OTHER),
            (KV + "REGISTER.SCHEMA", NARROW, *SCHEMA[2:], "FINGERPRINT", OTHER),
            (KV + "LOOKUP", NS, "FINGERPRINT", OTHER),
            (KV + "LOOKUP", NARROW, "FINGERPRINT", OTHER),
            (KV + "FETCH", NS, "FINGERPRINT", OTHER),
            (*STORE, "FINGERPRINT", OTHER, "DATA", ROW, ROW),
        ],
    ),
    # Rows
    (
        "layer [0-9]+ is outside this session's schema",
        [
            ("V.STOREBATCH", NARROW + b"_pk", 1, 0, 1, ROW),
            ("V.FETCH", NARROW + b"_pv", 1, 0),
            (KV + "STORE", NARROW, 0, 1, "DATA", ROW, ROW, ROW, ROW),
            (KV + "STORE", NARROW, 0, 1, "LAYERS", 1, 2, "DATA", ROW, ROW),
            ("V.FETCH", NARROW + b"_pv", "BATCH", 0, 1, 2),
            (KV + "FETCH", NARROW, "LAYERS", 1, 2),
        ],
    ),
    (
        "unknown session",
        [("V.STOREBATCH", NEW, 0, 0, 1, ROW), ("V.FETCH", NEW, 0, 0), ("V.FETCH", b"\r\n", 0, 0)],
    ),
    (
        "unknown namespace",
        [
            (KV + "STORE", NEW, 0, 1, "DATA", ROW, ROW),
            (KV + "WARM", NEW, 1, 2),
            (KV + "WARM", SID, 1, 2),
        ],
    ),
    ("the namespace is not complete", [(KV + "WARM", OPEN, 1, 2), (KV + "WARM", OPEN, 2, 1, NS)]),
    # Indexes
    ("unknown index", [with_word(words, 1, NEW) for words in INDEX[2:4]]),
    (
        "it exists with another layout",
        [
            ("KV.STORE", NS, 0, 0, 1, ROW * 2, ROW * 2),
            ("ATTEND.STORE", NS, 0, 1, 2, 1, ROW, ROW),
        ],
    ),
    ("a blob of rows has", [(*IX_STORE, b"", b""), (*IX_STORE, ROW[:-1], ROW)]),
    (
        "expected [0-9]+ bytes of",
        [(*IX_STORE, ROW, ROW * 2), (*IX_APPEND, ROW, ROW * 2), (*IX_APPEND, b"", ROW)],
    ),
    (
        "rows to store must lie in",
        [("KV.STORE", NS, 0, 2**31, 1, ROW, ROW)],
    ),
    ("rows of layer 0 are not made of heads", [("ATTEND.QUERY", NS, 0, 1, 3, 0, b"\0" * 12)]),
    (
        "the state has 2 K/V heads",
        [
            ("ATTEND.QUERY", NS, 1, 3, 1, 0, b"\0" * 12),
        ],
    ),
    (
        "layer 1 is outside this session's schema",
        [("ATTEND.QUERY", NARROW, 1, 1, 2, 0, ROW), ("KV.FETCH", NARROW, 1, 0, 1)],
    ),
    (
        "layer [0-9]+: rows? [0-9]+.* not stored",
        [
            ("ATTEND.QUERY", OPEN, 0, 1, 2, 0, ROW),
            ("ATTEND.QUERY", PART, 0, 1, 2, 0, ROW),
            ("KV.FETCH", NS, 0, 3, 5),
            ("KV.FETCH", NS, 0, 3, 9),
            ("KV.FETCH", NS, 0, 4, 5),
        ],
    ),
    # Attention
    (
        "expected [0-9]+ bytes of",
        [
            with_word(words, at, blob)
            for words in WHOLE
            for at in range(len(words) - (2 if words[0] == AP + "STORE" else 4), len(words))
            if isinstance(words[at], bytes) and words[0] != AP + "QUERY" and words[at] is not Q
            for blob in (b"", b"\0", bytes(words[at])[:-1], bytes(words[at]) + b"\0", LONG)
            if words[0] != BATCH[0] or at > 5
        ],
    ),
    ("session not found", [*of(NEW), *of(ATT, 1), *of(NS)]),
    ("-COLDMISS ", of(COLD)),
    (
        "the state has 2 K/V heads",
        [
            (AP + "QUERY", ATT, 0, 3, 2, 0, b"\0" * 24),
            (AP + "QUERY", ATT, 0, 2, 4, 0, Q),
            (AP + "QUERY_SPARSE", ATT, 0, 3, 2, 0, b"\0" * 24, b"", b"\0" * 12),
            (AP + "QUERY_FUSED", ATT, 0, 4, 2, 1, 1, Q, SUF[:8], SUF[:8], bytes(4)),
            (AP + "QUERY_SPARSE_AUTO", ATT, 0, 4, 2, 1, 2, 4, Q, MAP),
            (
                AP + "QUERY_SPARSE_AUTO_FUSED",
                ATT,
                0,
                4,
                2,
                1,
                2,
                1,
                1,
                Q,
                SUF[:8],
                SUF[:8],
                bytes(4),
            ),
        ],
    ),
    (
        "head_map names K/V head",
        [
            (*FUSED, Q, SUF, SUF, b"\0\0\1\2"),
            (*AUTO, Q, b"\xff\0\0\0"),
            (*AUTO_FUSED, Q, SUF, SUF, b"\0\0\2\0"),
        ],
    ),
    ("the [0-9]+ queries are the last rows of the suffix", [(*FUSED, Q * 2, SUF, SUF, MAP)]),
    (
        "counts has",
        [
            (*SPARSE, Q, IDS, b"\3\0\0\0" * 4),
            (*SPARSE, Q, IDS, b"\xff" * 16),
            (*SPARSE[:-1], "4", Q, bytes(64), b"\0\0\0\0" * 3 + b"\4\0\0\0"),
        ],
    ),
    (
        "indices names row",
        [(*SPARSE, Q, b"\3\0\0\0" * 8, COUNTS), (*SPARSE, Q, b"\xff" * 32, COUNTS)],
    ),
    (
        "expected [0-9]+ bytes",
        [
            *[(*PUT, blob) for blob in (b"", ROW[:-1], ROW + b"\0", ROW * 2, LONG)],
            (*PUT, ROW, "FMT", "FP16"),
            (*PUT[:-1], 2**31, ROW),
            *[(*STORE, "DATA", ROW, blob) for blob in (b"", ROW[:-1], ROW * 2)],
            (*STORE, "DATA", ROW, ROW, ROW, ROW[:4]),
            (*STORE, "FMT", "BF16", "DATA", ROW[:4], ROW),
        ],
    ),
    (
        "DATA takes a K and a V blob for each layer",
        [
            (*STORE, "DATA", ROW, ROW, ROW),
            (*STORE, "LAYERS", 0, 2, "DATA", ROW, ROW),
            (*STORE, "FMT", "FP32", "DATA"),
        ],
    ),
    (
        "rows to store must lie in",
        [("V.STOREBATCH", SID, 0, 2**31, 1, ROW), (KV + "STORE", NS, 2**31, 1, "DATA", ROW, ROW)],
    ),
    (
        "layer [0-9]+: rows? [0-9]+.* not stored",
        [
            ("V.FETCH", SID, 0, 4),
            ("V.FETCH", SID, 0, 0, 1, 2, 2**31),
            ("V.FETCH", SID, 1, 0),
            ("V.FETCH", SID, 0, "RANGE", 3, 5),
            ("V.FETCH", SID, 0, "RANGE", 0, 2**31),
            ("V.FETCH", SID, "BATCH", 0, 4, 2),
            ("V.FETCH", SID, "BATCH", 0, 4, 4096),
            (KV + "FETCH", NS, "RANGE", 3, 5),
            (KV + "FETCH", NS, "LAYERS", 1, 3),
            (KV + "WARM", COLD, 1, 2),
            (KV + "WARM", PART, 1, 2),
        ],
    ),
]


def documented(words: Words) -> list[re.Pattern[str]]:
    """What the page says this command may answer."""
    return [as_pattern(e) for e in (*TABLE[str(words[0])].errors, *reference.COMMON_ERRORS)]


def as_pattern(error: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<[^<>]*>", ".*", re.escape(error)))


@pytest.fixture(scope="module")
def state(raw: Any) -> Callable[[], Any]:
    """Fills the sessions; then tells all that refused commands might have changed."""
    options: Words = ("LAYERS", 2, "TOKENS", 4, "BLOCKS", 2, 2, HASHES, "FINGERPRINT", HEX)
    blobs = [bytes(range(layer, layer + 32)) for layer in range(4)]
    filling: list[Words] = [
        (KV + "REGISTER", NS, 2, "fp32", *options),
        (KV + "STORE", NS, 0, 4, "DATA", *blobs),
        (KV + "REGISTER.SCHEMA", NARROW, *SCHEMA[2:], "PARENT", NS),
        (SSM + "STORE", NS, 0, blobs[0]),
        (KV + "STORE", NARROW, 0, 1, "DATA", ROW, ROW),
        ("V.CREATE", SID, 2, "VQUANT", "fp32"),
        ("V.STOREBATCH", SID, 0, 0, 4, blobs[0]),
        (KV + "REGISTER", OPEN, 2, "fp32", "LAYERS", 1, "TOKENS", 3),
        (AP + "STORE", ATT, 0, 2, 3, 2, KV3, KV3),
        (AP + "STORE", COLD, 0, 2, 3, 2, KV3, KV3),
        (KV + "REGISTER", COLD, 2, "fp32"),
        ("V.STOREBATCH", COLD + b"_pk", 0, 0, 1, ROW),
        (KV + "REGISTER", PART, 2, "fp32"),
        ("V.STOREBATCH", PART + b"_pk", 0, 0, 2, ROW * 2),
    ]
    assert [raw.ask(*words) for words in filling] == ["+OK"] * len(filling)

    reads: list[Words] = [
        (KV + "INFO",),
        (KV + "LOOKUP", NEW),
        (KV + "FETCH", NS, "FINGERPRINT", HEX),
        (KV + "FETCH", NARROW),
        (KV + "BLOCKS", NS),
        ("V.FETCH", SID, 0, "RANGE", 0, 4),
        (SSM + "FETCH", NS, 0),
        (*QUERY, Q),
        *[(AP + "LOOKUP", name, 0) for name in (ATT, COLD, NEW, NS)],
    ]

    def state() -> Any:
        for words in reads:
            raw.send(*words)
        info, *rest = [raw.reply() for _ in reads]
        return [line for line in info.splitlines() if b"fetches" not in line], rest

    return state


@pytest.mark.parametrize(("pattern", "commands"), REFUSED, ids=[row[0][:40] for row in REFUSED])
def test_refused(raw: Any, state: Callable[[], Any], pattern: str, commands: list[Words]) -> None:
    expected = re.compile(pattern if pattern.startswith("-") else f"-ERR ({pattern})")
    before = state()
    for words in commands:
        reply = raw.ask(*words)
        assert isinstance(reply, str), words
        assert expected.match(reply), words
        assert any(error.match(reply) for error in documented(words)), words
        assert len(reply) < 1000
        assert state() == before, words


def test_every_documented_error_is_provoked_by_the_table(raw: Any, state: Any) -> None:
    replies: dict[str, list[str]] = {}
    for words in (words for _, commands in REFUSED for words in commands):
        replies.setdefault(str(words[0]), []).append(raw.ask(*words))
    elsewhere = {"-OOM", "-ERR the session was replaced", "-ERR the namespace was changed"}
    for name, given in replies.items():
        for error in set(TABLE[name].errors) - elsewhere:
            assert any(map(as_pattern(error).match, given)), (name, error)
