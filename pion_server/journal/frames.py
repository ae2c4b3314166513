"""The bytes of a log or snapshot file, as far as they do not depend on what is logged.

    file    header | the same header again | record | record | ...
    record  frame | meta | payload | meta | frame

All numbers are little-endian. A record has its frame and meta at both ends, each frame with its own
checksum and that of the meta; so one damaged spot hides neither what a record was about nor where
it ends. The checksums of frames are seeded with the file's salt, a random number: bytes that
look like a frame inside a payload, whoever put them there, are never taken for one. Every checksum
is xxh3_64 (https://github.com/Cyan4973/xxHash).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from pion_server.errors import PionError

VERSION = 1

_SUM = struct.Struct("<Q")
_FILE = struct.Struct("<8sHHIQQ")
_FILE_MAGIC = b"PionLog\n"
_FILE_COPY = _FILE.size + _SUM.size
FILE_BYTES = 2 * _FILE_COPY

_FRAME = struct.Struct("<4sHHQQQQQ")
HEAD_MAGIC = b"\xcaPh\xfe"
TAIL_MAGIC = b"\xcaPt\xfe"
FRAME_BYTES = _FRAME.size + _SUM.size


class FileKind(IntEnum):
    LOG = 1
    SNAPSHOT = 2


@dataclass(frozen=True, slots=True)
class FileHeader:
    """`number` is the sequence number of the first record of a log, or the last one that a
    snapshot covers. `promises`: what was acknowledged was to outlive a power cut, at once or
    within a second."""

    kind: FileKind
    number: int
    salt: int
    promises: bool = False

    def pack(self) -> bytes:
        fields = _FILE.pack(_FILE_MAGIC, VERSION, self.kind, self.promises, self.number, self.salt)
        return 2 * (fields + _SUM.pack(xxh3_64_intdigest(fields)))


def read_file_header(data: bytes) -> FileHeader | None:
    """The header from the first FILE_BYTES of a file, from whichever copy is whole; None where
    neither is. Raises PionError for a format that this version does not know."""
    for copy in (data[:_FILE_COPY], data[_FILE_COPY:FILE_BYTES]):
        fields = copy[: _FILE.size]
        if len(copy) < _FILE_COPY or _SUM.pack(xxh3_64_intdigest(fields)) != copy[_FILE.size :]:
            continue
        magic, version, kind, promises, number, salt = _FILE.unpack(fields)
        if magic != _FILE_MAGIC or version != VERSION:
            raise PionError(f"format {version} of the log is not known to this version of Pion")
        return FileHeader(FileKind(kind), number, salt, bool(promises))
    return None


@dataclass(frozen=True, slots=True)
class Frame:
    """What frames a record. `synced`: every record up to this one was known to outlive a power cut
    when this one was written. `meta` and `payload` are lengths in bytes."""

    kind: int
    sequence: int
    synced: int
    meta: int
    payload: int
    meta_sum: int

    @property
    def record_bytes(self) -> int:
        """Length of the whole record."""
        return 2 * (FRAME_BYTES + self.meta) + self.payload

    def pack(self, magic: bytes, salt: int) -> bytes:
        fields = _FRAME.pack(
            magic,
            self.kind,
            0,
            self.sequence,
            self.synced,
            self.meta,
            self.payload,
            self.meta_sum,
        )
        return fields + _SUM.pack(xxh3_64_intdigest(fields, salt))


def read_frame(data: bytes, magic: bytes, salt: int) -> Frame | None:
    """The frame in FRAME_BYTES bytes; None where they are anything else."""
    fields = data[: _FRAME.size]
    if len(data) < FRAME_BYTES or not data.startswith(magic):
        return None
    if _SUM.pack(xxh3_64_intdigest(fields, salt)) != data[_FRAME.size :]:
        return None
    _, kind, _, sequence, synced, meta, payload, meta_sum = _FRAME.unpack(fields)
    return Frame(kind, sequence, synced, meta, payload, meta_sum)


def wrap(
    kind: int, sequence: int, synced: int, meta: bytes, payload: int, salt: int
) -> tuple[bytes, bytes]:
    """What goes before and after `payload` bytes to make them a record."""
    frame = Frame(kind, sequence, synced, len(meta), payload, xxh3_64_intdigest(meta))
    return frame.pack(HEAD_MAGIC, salt) + meta, meta + frame.pack(TAIL_MAGIC, salt)
