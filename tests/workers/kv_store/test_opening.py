"""Which tiers a worker gets from its settings, what it says of those it does not get, and how fast it takes them to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from conductor.config import StoreSection
from conductor.core.types import Tier
from tests.workers.kv_store.doubles import FORMAT
from workers.kv_store.files import Files
from workers.kv_store.opening import UNKNOWN_BYTES_PER_S, OpenedTiers, memory_bytes, open_tiers, probe_bytes_per_s
from workers.kv_store.retention import DAY_S
from workers.kv_store.settings import StoreSettings, settings_from
from workers.kv_store.throttled_files import ThrottledFiles


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(
        deployment=f"test-{uuid4().hex}",
        host_bytes=1 << 20,
        disk_directory=tmp_path / "disk",
        disk_bytes=1 << 20,
        shared_paths=(str(tmp_path / "shared"),),
        shared_bytes=1 << 20,
    )


def close(opened: OpenedTiers) -> None:
    for tier in opened.tiers:
        tier.close()


def test_tiers_come_fastest_first_with_their_speeds(settings: StoreSettings) -> None:
    """Speeds are listed as a cost profile has them; the device pool's is not known here."""
    opened = open_tiers(settings, FORMAT, "node")
    assert [tier.tier for tier in opened.tiers] == [Tier.HOST, Tier.DISK, Tier.SHARED]
    assert [speed > 0 for speed in opened.speeds()] == [False, True, True, True]
    close(opened)


def test_nothing_is_opened_that_was_not_asked_for() -> None:
    opened = open_tiers(StoreSettings(), FORMAT, "node")
    assert (opened.tiers, opened.speeds(), opened.failures) == ((), (), {})


def test_each_tier_fails_alone_and_says_why(settings: StoreSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Too small for a block, no directory, and one that works."""
    (tmp_path / "file").write_text("")
    opened = open_tiers(replace(settings, host_bytes=1, disk_directory=tmp_path / "file" / "x"), FORMAT, "node")
    assert [tier.tier for tier in opened.tiers] == [Tier.SHARED]
    assert "one block needs" in opened.failures[Tier.HOST]
    assert "file" in opened.failures[Tier.DISK]
    assert caplog.text.count("there is no") == 2
    close(opened)


def test_a_throttle_shows_in_the_speed(settings: StoreSettings) -> None:
    opened = open_tiers(replace(settings, throttle_bytes_per_s=1e8), FORMAT, "node")
    assert opened.bytes_per_s[Tier.DISK] <= 1e8
    assert opened.bytes_per_s[Tier.HOST] > 1e8
    close(opened)


@pytest.mark.parametrize("place", ["/nonexistent/here", "memory://bucket"])
def test_a_place_that_takes_no_probe_is_taken_for_slow(place: str) -> None:
    assert probe_bytes_per_s(place, Files()) == UNKNOWN_BYTES_PER_S


def test_memory_is_bounded_by_what_there_is() -> None:
    assert memory_bytes(Path("/nonexistent")) == 0
    assert memory_bytes(Path("/dev/shm")) > 0


def test_throttled_files_take_their_time(tmp_path: Path) -> None:
    slept: list[float] = []
    files = ThrottledFiles(100.0, slept.append)
    files.append(tmp_path / "file", [b"x" * 50])
    assert bytes(files.read(tmp_path / "file", 0, 80)) == b"x" * 50
    assert slept == [0.5, 0.5]


def test_a_configuration_section_becomes_settings(tmp_path: Path) -> None:
    """Megabytes and days become bytes and seconds; only host memory is on by default."""
    section = StoreSection(shared_paths=("/a", "/b"), agent_retention_days=1, throttle_mib_per_s=2)
    made = settings_from(section.model_dump(), "name")
    assert (made.host_bytes, made.disk_directory, made.shared_paths) == (1 << 30, None, ("/a", "/b"))
    assert (made.retention.targets_s["agent"], made.throttle_bytes_per_s) == (DAY_S, 2 << 20)
    assert open_tiers(replace(settings_from(StoreSection().model_dump(), "n"), host_bytes=0), FORMAT, "node").tiers == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_bytes", -1),
        ("replay_windows", -1),
        ("queue_blocks", 0),
        ("throttle_bytes_per_s", 0.0),
        ("report_interval_s", 0.0),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"store.{field} is {value}"):
        StoreSettings(**{field: value})
