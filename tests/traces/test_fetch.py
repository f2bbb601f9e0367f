"""Fetching a trace: checked, resumed, in place whole or not at all; against a server on this host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response

from tests.traces.scripted_server import serving
from traces.fetch import FetchError, fetch

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Files:
    """A server of one file; `etag` names its version."""

    def __init__(self) -> None:
        self.etag = '"v1"'
        self.ranges: list[str | None] = []
        self.app = FastAPI()
        self.app.get("/trace.jsonl")(self.trace)

    async def trace(self, request: Request) -> Response:
        asked = request.headers.get("range")
        self.ranges.append(asked)
        headers = {"etag": self.etag}
        if asked is None or request.headers.get("if-range") != self.etag:
            return Response(CONTENT, headers=headers)
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(CONTENT):
            return Response(status_code=416, headers={"content-range": f"bytes */{len(CONTENT)}"})
        return Response(CONTENT[start:], status_code=206, headers=headers)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def url(files: Files) -> Iterator[str]:
    with serving(files.app) as root:
        yield f"{root}/trace.jsonl"


def left_off(target: Path, content: bytes, etag: str = '"v1"') -> None:
    """The state that an interrupted download leaves."""
    target.with_name(target.name + ".part").write_bytes(content)
    target.with_name(target.name + ".part.etag").write_text(etag)


def test_download_arrives_whole_and_nothing_else_is_left(url: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    found = fetch(url, tmp_path / "t", sha256=SHA256.upper(), progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "t").read_bytes() == CONTENT
    assert (len(CONTENT), SHA256, 0) == (found.size_bytes, found.sha256, found.resumed_from_bytes)
    assert (len(CONTENT), len(CONTENT)) == seen[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("have_bytes", [1, 70_000, len(CONTENT)])
def test_interrupted_download_goes_on_where_it_stopped(files: Files, url: str, tmp_path: Path, have_bytes: int) -> None:
    left_off(tmp_path / "t", CONTENT[:have_bytes])
    found = fetch(url, tmp_path / "t", sha256=SHA256)
    assert have_bytes == found.resumed_from_bytes
    assert [f"bytes={have_bytes}-"] == files.ranges
    assert (tmp_path / "t").read_bytes() == CONTENT


def test_file_that_has_changed_is_fetched_anew(url: str, tmp_path: Path) -> None:
    left_off(tmp_path / "t", b"old" * 10, etag='"v0"')
    assert fetch(url, tmp_path / "t", sha256=SHA256).resumed_from_bytes == 0


def test_weak_validator_cannot_be_resumed(files: Files, url: str, tmp_path: Path) -> None:
    files.etag = 'W/"v1"'
    fetch(url, tmp_path / "t")
    (tmp_path / "t.part").write_bytes(b"half")
    fetch(url, tmp_path / "t", sha256=SHA256)
    assert files.ranges == [None, None]


def test_wrong_checksum_throws_the_download_away_and_keeps_the_old_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"old")
    with pytest.raises(FetchError, match=f"sha256 is {SHA256}; allowed: {'0' * 64}"):
        fetch(url, tmp_path / "t", sha256="0" * 64)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_address_without_a_file_and_address_of_no_server_are_told(url: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="the server answers 404; allowed: 200 or 206"):
        fetch(url + "x", tmp_path / "t")
    with pytest.raises(FetchError, match="ConnectError"):
        fetch("http://127.0.0.1:1/t", tmp_path / "t")
    with pytest.raises(FetchError, match="allowed: an http or https address"):
        fetch("ftp://127.0.0.1/t", tmp_path / "t")
