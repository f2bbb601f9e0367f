"""Liveness, readiness, metrics, models and decisions."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conductor.core.types import RejectReason
from conductor.engine_client import ClusterStatus
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import CONTEXT, MODEL, Live, StartGateway


def samples(live: Live) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(live.client.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples
    }


def test_health_needs_no_cluster(live: Live) -> None:
    live.engine.ready = ConnectionError("gone")
    assert live.client.get("/health").json() == {"status": "ok"}


def test_ready_follows_the_cluster(live: Live) -> None:
    assert live.client.get("/ready").json() == {"status": "ready", "model": MODEL}
    live.engine.ready = ClusterStatus(False, "no decode worker has joined", MODEL)
    answer = live.client.get("/ready")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no decode worker has joined")
    live.engine.ready = ConnectionError("gone")
    assert live.client.get("/ready").status_code == 503


def test_models_are_listed_with_their_context(live: Live) -> None:
    cards = live.client.get("/v1/models").json()
    assert [card["id"] for card in cards["data"]] == [MODEL, "alias"]
    assert cards["data"][0]["max_model_len"] == CONTEXT
    assert live.client.get("/v1/models/alias").json()["object"] == "model"
    assert live.client.get("/v1/models/other/name").json()["error"]["code"] == "model_not_found"


def test_a_decision_can_be_asked_for(live: Live) -> None:
    decision_id = live.complete().headers["x-conductor-decision-id"]
    record = live.client.get(f"/v1/decisions/{decision_id}").json()
    assert (record["request_id"], record["candidates"][0]["worker"]) == (decision_id, "p0")


@pytest.mark.parametrize("decision_id", ["unknown", "%00", "..%2f..", "x" * 3000])
def test_an_unknown_decision_is_404(live: Live, decision_id: str) -> None:
    assert live.client.get(f"/v1/decisions/{decision_id}").status_code == 404


def test_metrics_count_requests_tokens_and_times(start_gateway: StartGateway) -> None:
    live = start_gateway()
    live.engine.script = Script(reused_tokens=2)
    live.complete("hey")
    live.chat(stream=True)
    live.complete(temperature=9)
    live.client.get("/nowhere")
    found = samples(live)
    assert found["conductor_requests_total", (("code", "200"), ("endpoint", "/v1/completions"))] == 1
    assert found["conductor_requests_total", (("code", "200"), ("endpoint", "/v1/chat/completions"))] == 1
    assert found["conductor_requests_total", (("code", "400"), ("endpoint", "/v1/completions"))] == 1
    assert found["conductor_requests_total", (("code", "404"), ("endpoint", "other"))] == 1
    assert found["conductor_output_tokens_total", ()] == 10
    assert found["conductor_prompt_hit_tokens_total", ()] == 4
    assert found["conductor_ttft_seconds_count", ()] == 2
    assert found["conductor_tbt_seconds_count", ()] == 8
    assert found["conductor_ttft_estimate_ratio_count", ()] == 2
    assert found["conductor_ttft_estimate_error_seconds_count", ()] == 2
    assert found["conductor_requests_in_flight", ()] == 0
    assert found["conductor_requests_waiting", ()] == 0


def test_metrics_tell_how_well_the_index_knows_a_cache(start_gateway: StartGateway) -> None:
    """Of 12 tokens that were expected 7 were there, and 3 of those that were there had not been expected: precision is 7 in
    12, recall 7 in 10."""
    live = start_gateway()
    for expected, found in ((8, 3), (4, 4), (0, 3)):
        live.engine.script = Script(expected_tokens=expected, reused_tokens=found)
        assert live.complete("a prompt of many tokens").status_code == 200
    worker = (("worker", "p0"),)
    seen = samples(live)
    kinds = ("predicted", "actual", "confirmed")
    assert [seen[f"conductor_index_{kind}_tokens_total", worker] for kind in kinds] == [12, 10, 7]


def test_metrics_count_rejections_by_reason(start_gateway: StartGateway) -> None:
    live = start_gateway()
    live.engine.script = Script(rejection=RejectReason.TBT_SLO)
    live.complete()
    found = samples(live)
    assert found["conductor_rejections_total", (("reason", "tbt_slo"),)] == 1
    assert found["conductor_requests_total", (("code", "429"), ("endpoint", "/v1/completions"))] == 1
    assert ("conductor_ttft_seconds_count", ()) in found
    assert found["conductor_requests_waiting", ()] == 0


def test_metrics_show_the_cluster(live: Live) -> None:
    found = samples(live)
    assert found["conductor_worker_queued_requests", (("worker", "p0"),)] == 3
    assert found["conductor_cluster_index_blocks", ()] == 12
    assert found["conductor_ready", ()] == 1
    live.engine.ready = ConnectionError("gone")
    assert samples(live)["conductor_ready", ()] == 0


def test_the_openapi_document_describes_the_bodies(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in document["components"]["schemas"]["ChatBody"]["required"]
