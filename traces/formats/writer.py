"""Write any trace as Mooncake JSONL, plain or compressed by the file's suffix, and never half a file.

Blocks may be made larger, never smaller: ids of `n` neighbouring blocks become one, chained over the whole prefix, so the
result is a prefix id even where the source's ids named single blocks. Requests without prefix identity get ids that nobody
shares: they reuse nothing, as far as the source tells.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import zstandard

from traces.schema import TraceRequest

MS_PER_S = 1000
CHAIN_BYTES = 8
LONE_ID_BASE = 1 << 62  # above every chained id, whose two top bits are cleared


def write_mooncake(requests: Iterable[TraceRequest], path: Path, block_tokens: int) -> int:
    """Write `requests` to `path` with blocks of `block_tokens`; returns how many. Replaces `path` only when all is written.

    Raises ValueError when `block_tokens` is no multiple of the source's block.
    """
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with _compressed(part, path.suffix) as stream:
            for line in mooncake_lines(requests, block_tokens):
                stream.write(line.encode())
                count += 1
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return count


def mooncake_lines(requests: Iterable[TraceRequest], block_tokens: int) -> Iterator[str]:
    """One JSON line a request."""
    for number, request in enumerate(requests):
        fields = {
            "timestamp": round(request.timestamp_s * MS_PER_S),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": _ids(request, number, block_tokens),
        }
        yield json.dumps(fields) + "\n"


def _ids(request: TraceRequest, number: int, block_tokens: int) -> list[int]:
    blocks = -(-request.input_tokens // block_tokens)
    if not request.hash_ids:
        return [LONE_ID_BASE + _chain(number, (index,)) for index in range(blocks)]
    if request.block_tokens == block_tokens and len(request.hash_ids) == blocks:
        return list(request.hash_ids)
    if block_tokens % request.block_tokens:
        raise ValueError(f"block is {block_tokens} tokens; allowed: a multiple of the source's {request.block_tokens}")
    return _merged(request, number, block_tokens // request.block_tokens, blocks)


def _merged(request: TraceRequest, number: int, ratio: int, blocks: int) -> list[int]:
    chained: list[int] = []
    previous = 0
    for index in range(blocks):
        group = request.hash_ids[index * ratio : (index + 1) * ratio]
        previous = _chain(previous, group) if group else LONE_ID_BASE + _chain(previous, (number,))
        chained.append(previous)
    return chained


def _chain(previous: int, ids: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(digest_size=CHAIN_BYTES)
    for each in (previous, *ids):
        digest.update(each.to_bytes(CHAIN_BYTES, "little"))
    return int.from_bytes(digest.digest(), "little") >> 2


@contextmanager
def _compressed(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    with path.open("wb") as raw:
        if suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as stream:
                yield cast(IO[bytes], stream)
        elif suffix == ".zst":
            with (
                zstandard.ZstdCompressor().stream_writer(raw) as writer,
                io.BufferedWriter(cast(io.RawIOBase, writer)) as buffered,
            ):
                yield buffered
        else:
            yield raw
