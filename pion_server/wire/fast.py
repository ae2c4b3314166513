"""The binary lane's headers and numbers; docs/FASTLANE.md has them byte by byte.

It carries the same requests and replies as RESP does. What it spares is the reading and writing of
decimal numbers: every length stands at a known place, in binary.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

MAGIC: Final = 0xCA5E
VERSION: Final = 1

# A request: magic, version, number of the command, count of arguments, bytes behind this header.
REQUEST: Final = Struct("<HBBIQ")
# In front of the arguments, each one's length.
LENGTH_BYTES: Final = 8
# A value of a reply, those inside of arrays and maps too: magic, status, type, then the bytes of
# payload behind this header, or how many items (of a map: pairs) follow.
VALUE: Final = Struct("<HBcQ")

OK: Final = 0x00
ERROR: Final = 0x01
COLDMISS: Final = 0x03

# Types are RESP3's letters.
NULL, BOOLEAN, INTEGER, DOUBLE = b"_", b"#", b":", b","
STATUS, ERROR_TEXT, BULK, ARRAY, MAP = b"+", b"-", b"$", b"*", b"%"

INT64: Final = Struct("<q")
FLOAT64: Final = Struct("<d")

# The name is the first argument: every command can be sent so.
BY_NAME: Final = 0x00
# Numbers are never given to another command. A test asks for one for each command of our own.
COMMANDS: Final = {
    0x01: "PING",
    0x02: "AUTH",
    0x03: "HELLO",
    0x04: "SELECT",
    0x05: "QUIT",
    0x06: "PION.STATS",
    0x07: "PION.WORKERS",
    0x10: "KV.PREFIX.REGISTER",
    0x11: "KV.PREFIX.REGISTER.SCHEMA",
    0x12: "KV.PREFIX.LOOKUP",
    0x13: "KV.PREFIX.MATCH",
    0x14: "KV.PREFIX.STORE",
    0x15: "KV.PREFIX.FETCH",
    0x16: "KV.PREFIX.DROP",
    0x17: "KV.PREFIX.INFO",
    0x18: "KV.PREFIX.BLOCKS",
    0x19: "KV.PREFIX.MEMBERSHIP",
    0x1A: "KV.PREFIX.WARM",
    0x1B: "KV.PREFIX.SAVE",
    0x20: "ATTEND.PREFIX.STORE",
    0x21: "ATTEND.PREFIX.LOOKUP",
    0x22: "ATTEND.PREFIX.QUERY",
    0x23: "ATTEND.PREFIX.QUERY_SPARSE",
    0x24: "ATTEND.PREFIX.QUERY_FUSED",
    0x25: "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
    0x26: "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
    0x28: "ATTEND.QUERYBATCH",
    0x29: "ATTEND.STORE",
    0x2A: "ATTEND.QUERY",
    0x30: "V.CREATE",
    0x31: "V.STOREBATCH",
    0x32: "V.FETCH",
    0x40: "SSM.PREFIX.STORE",
    0x41: "SSM.PREFIX.FETCH",
    0x42: "SSM.PREFIX.DROP",
    0x50: "KV.STORE",
    0x51: "KV.FETCH",
    0x52: "KV.INFO",
}
NUMBERS: Final = {name: number for number, name in COMMANDS.items()}
