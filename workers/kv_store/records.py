"""How one block is written where it outlives the process: a header of fixed size that describes and guards the bytes after it.

The header carries the fingerprint of the whole format (namespace, layout and its version, shape, dtype), the block's hash, its
parent's, the traffic class, the time of storing, the length and XXH3 of the payload, and an XXH3 of itself. `open_record`
trusts nothing: every reason why bytes are not the block that was asked for has a name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from conductor.core.types import BlockHash
from workers.kv_store.base import HASH_BYTES, BlockFormat, NewBlock, checksum
from workers.kv_transfer.base import KVArray

MAGIC = b"KVBLOCK1"
_FIELDS = struct.Struct("<8s16s16s16sB23sdQQ")
_GUARD = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _GUARD.size
MAX_CLASS_BYTES = 23


class Damage(StrEnum):
    """Why bytes are not a block of this store."""

    TRUNCATED = "truncated"
    HEADER = "header"
    FOREIGN = "foreign format"
    NAME = "another block"
    PAYLOAD = "checksum"


@dataclass(frozen=True, slots=True)
class Header:
    fingerprint: bytes
    name: BlockHash
    parent: BlockHash | None
    traffic_class: str
    stored_s: float
    payload_bytes: int
    payload_checksum: int


def record_bytes(block_format: BlockFormat) -> int:
    return HEADER_BYTES + block_format.block_bytes


def encode_header(block: NewBlock, fingerprint: bytes, stored_s: float) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        fingerprint,
        block.name.to_bytes(HASH_BYTES, "little"),
        (block.parent or 0).to_bytes(HASH_BYTES, "little"),
        block.parent is not None,
        block.traffic_class.encode()[:MAX_CLASS_BYTES],
        stored_s,
        block.data.nbytes,
        checksum(block.data),
    )
    return fields + _GUARD.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(data: KVArray) -> Header | Damage:
    """What the first `HEADER_BYTES` of `data` say."""
    if len(data) < HEADER_BYTES:
        return Damage.TRUNCATED
    raw = data[:HEADER_BYTES].tobytes()
    fields, guard = raw[: _FIELDS.size], _GUARD.unpack(raw[_FIELDS.size :])[0]
    if not raw.startswith(MAGIC) or xxhash.xxh3_64_intdigest(fields) != guard:
        return Damage.HEADER
    _, fingerprint, name, parent, has_parent, traffic_class, stored_s, size, payload_checksum = _FIELDS.unpack(fields)
    return Header(
        fingerprint,
        int.from_bytes(name, "little"),
        int.from_bytes(parent, "little") if has_parent else None,
        traffic_class.rstrip(b"\0").decode(errors="replace"),
        stored_s,
        size,
        payload_checksum,
    )


def open_record(data: KVArray, name: BlockHash, fingerprint: bytes, payload_bytes: int) -> KVArray | Damage:
    """The verified payload of a record of block `name` in the format `fingerprint`."""
    header = decode_header(data)
    if isinstance(header, Damage):
        return header
    if header.fingerprint != fingerprint or header.payload_bytes != payload_bytes:
        return Damage.FOREIGN
    if header.name != name:
        return Damage.NAME
    payload = data[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if len(payload) < header.payload_bytes:
        return Damage.TRUNCATED
    return payload if checksum(payload) == header.payload_checksum else Damage.PAYLOAD
