"""What an operator asks of a worker's tiers, held against each kind of tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.kv_store.conftest import MAKERS
from tests.workers.kv_store.doubles import chain, damage, new_blocks
from tests.workers.kv_store.test_files_on_disk import flip_payload, payload_files
from workers.cache_commands import carry_out
from workers.kv_store.base import KVTier


@pytest.fixture(params=sorted(MAKERS))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVTier]:
    tier: KVTier = MAKERS[request.param](tmp_path)
    tier.put(new_blocks(chain(0, 5), "agent"))
    tier.put(new_blocks(chain(1, 4)))
    yield tier
    tier.close()


def ask(tier: KVTier, action: str, name: int | None = None) -> object:
    (answer,) = carry_out([tier], action, name).values()
    return answer


def test_prefixes_are_listed_by_their_last_block(tier: KVTier) -> None:
    listed = ask(tier, "ls")
    assert isinstance(listed, list)
    assert {(row["hash"], row["blocks"], row["class"]) for row in listed} == {
        (f"{chain(0, 5)[-1]:032x}", 5, "agent"),
        (f"{chain(1, 4)[-1]:032x}", 4, "chat"),
    }
    assert [row["blocks"] for row in ask(tier, "ls", chain(0, 5)[3])] == [1, 2, 3, 4]  # type: ignore[attr-defined]


def test_a_pin_covers_what_leads_to_it_and_is_taken_back_alone(tier: KVTier) -> None:
    """Two pinned prefixes share their first two blocks: unpinning one leaves the other as it was."""
    assert (ask(tier, "pin", chain(0, 5)[-1]), ask(tier, "pin", chain(1, 4)[-1])) == (5, 4)
    assert ask(tier, "drop") == 0
    assert ask(tier, "unpin", chain(0, 5)[-1]) == 3
    assert ask(tier, "drop") == 3
    assert {block.name for block in tier.held() if block.pinned} == set(chain(1, 4)) == set(tier.snapshot())
    assert ask(tier, "unpin", chain(1, 4)[-1]) == 4
    assert ask(tier, "drop") == 4


def test_a_dropped_prefix_takes_what_follows_it(tier: KVTier) -> None:
    assert ask(tier, "drop", chain(0, 5)[2]) == 3
    assert set(tier.snapshot()) == set(chain(1, 4))


def test_verifying_quarantines_what_is_damaged(tier: KVTier, tmp_path: Path) -> None:
    assert ask(tier, "verify") == {"checked": 7, "damaged": 0}
    assert ask(tier, "verify", chain(1, 4)[1]) == {"checked": 2, "damaged": 0}
    damage(payload_files(tmp_path)[0], flip_payload)
    answer = ask(tier, "verify")
    assert isinstance(answer, dict)
    assert answer["damaged"] >= 1
    assert tier.stats().quarantined >= 1


@pytest.mark.parametrize(("action", "name"), [("burn", None), ("pin", None), ("unpin", None)])
def test_what_is_not_understood_is_refused(tier: KVTier, action: str, name: None) -> None:
    with pytest.raises(ValueError, match="allowed"):
        carry_out([tier], action, name)
