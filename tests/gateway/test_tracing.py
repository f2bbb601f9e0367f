"""Trace context and spans, as a collector on a real socket receives them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from conductor.core.types import RejectReason
from conductor.gateway.tracing import Tracing, TracingError, tracing_from
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live, StartGateway
from tests.gateway.test_lifecycle import eventually

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@dataclass
class Collector:
    """An OTLP/HTTP endpoint that remembers spans."""

    url: str
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def wait(self, tracing: Tracing) -> None:
        """Until a whole trace has come: its first span is sent last, after the client has its answer."""
        eventually(lambda: any(span.name == "POST /v1/completions" for span in self.spans))
        tracing.close()

    def attributes(self, name: str) -> dict[str, Any]:
        (span,) = [span for span in self.spans if span.name == name]
        return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever).start()
        yield found
        server.shutdown()


@pytest.fixture
def tracing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Tracing:
    """Configured as an operator would: one environment variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    return Tracing(tracing_from({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))


def ask(live: Live, **headers: str) -> httpx.Response:
    return live.post("/v1/completions", {"model": MODEL, "prompt": "x"}, **headers)


def test_a_generation_becomes_spans_of_the_client_s_trace(
    start_gateway: StartGateway, collector: Collector, tracing: Tracing
) -> None:
    live = start_gateway(tracing=tracing)
    live.engine.script = Script(reused_tokens=2, delay_s=0.01)
    answer = ask(live, traceparent=TRACEPARENT)
    collector.wait(tracing)
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"POST /v1/completions", "prepare", "wait", "decide", "first_token", "hand_over", "decode"}
    root = by_name.pop("POST /v1/completions")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert root.parent_span_id.hex() == PARENT_ID
    assert {span.parent_span_id for span in by_name.values()} == {root.span_id}
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01"
    assert collector.services == {"conductor-gateway"}
    ordered = [by_name[name] for name in ("prepare", "wait", "decide", "first_token", "hand_over", "decode")]
    for before, after in pairwise(ordered):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    assert root.start_time_unix_nano <= ordered[0].start_time_unix_nano
    assert ordered[-1].end_time_unix_nano <= root.end_time_unix_nano


def test_spans_tell_prediction_and_outcome(start_gateway: StartGateway, collector: Collector, tracing: Tracing) -> None:
    live = start_gateway(tracing=tracing)
    live.engine.script = Script(reused_tokens=2)
    ask(live)
    collector.wait(tracing)
    first = collector.attributes("first_token")
    assert (first["conductor.predicted.queue_s"], first["conductor.predicted.transfer_s"]) == (0.1, 0.02)
    assert (first["conductor.prefill_worker"], first["conductor.reused_tokens"]) == ("p0", 2)
    root = collector.attributes("POST /v1/completions")
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (2, 5)
    assert (root["conductor.tenant"], root["http.response.status_code"]) == ("default", 200)


def test_what_the_cluster_knows_divides_the_time_to_the_first_token(
    start_gateway: StartGateway, collector: Collector, tracing: Tracing
) -> None:
    """Into the wait and the computing; news that came later than the token itself ends with it."""
    live = start_gateway(tracing=tracing)
    actual = {"prefill_started_s": 0.15, "prefill_finished_s": 30.0, "prefill_compute_s": 0.02, "fetch_s": 0.05}
    live.engine.script = Script(tokens=b"x", delay_s=0.3, actual=actual)
    ask(live)
    collector.wait(tracing)
    by_name = {span.name: span for span in collector.spans}
    whole, queue, prefill = (by_name[name] for name in ("first_token", "queue", "prefill"))
    pull = by_name["pull"]
    assert {part.parent_span_id for part in (queue, pull, prefill)} == {whole.span_id}
    assert pull.start_time_unix_nano == queue.start_time_unix_nano
    assert pull.start_time_unix_nano < pull.end_time_unix_nano < queue.end_time_unix_nano
    assert queue.start_time_unix_nano == whole.start_time_unix_nano
    assert queue.start_time_unix_nano < queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano == whole.end_time_unix_nano
    assert collector.attributes("prefill")["conductor.compute_s"] == 0.02


def test_a_cluster_that_does_not_answer_costs_two_spans(
    start_gateway: StartGateway, collector: Collector, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start_gateway(tracing=tracing)

    async def silent(_: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(live.engine, "decision", silent)
    assert ask(live).status_code == 200
    collector.wait(tracing)
    assert {"first_token", "decode"} <= {span.name for span in collector.spans}
    assert {"queue", "prefill"}.isdisjoint(span.name for span in collector.spans)


def test_a_refusal_has_a_decision_and_no_tokens(start_gateway: StartGateway, collector: Collector, tracing: Tracing) -> None:
    live = start_gateway(tracing=tracing)
    live.engine.script = Script(rejection=RejectReason.OVERLOAD)
    ask(live)
    collector.wait(tracing)
    assert {span.name for span in collector.spans} == {"POST /v1/completions", "prepare", "wait", "decide"}
    assert collector.attributes("decide")["conductor.outcome"] == "rejected"
    assert collector.attributes("POST /v1/completions")["http.response.status_code"] == 429


def test_without_exporters_the_context_is_passed_back(live: Live) -> None:
    assert ask(live, traceparent=TRACEPARENT).headers["traceparent"] == TRACEPARENT
    assert live.client.get("/health", headers={"traceparent": TRACEPARENT}).headers["traceparent"] == TRACEPARENT


@pytest.mark.parametrize("broken", ["", "00-x", f"ff-{TRACE_ID}-{PARENT_ID}-01", f"00-{'0' * 32}-{PARENT_ID}-01", "x" * 500])
def test_a_broken_context_is_ignored(live: Live, broken: str) -> None:
    answer = ask(live, traceparent=broken)
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers


def test_nothing_is_traced_unless_asked_for() -> None:
    assert tracing_from({}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert tracing_from(endpoint | {"OTEL_SDK_DISABLED": "true"}) is None
    assert tracing_from(endpoint | {"OTEL_TRACES_EXPORTER": "none"}) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'; allowed: otlp, console, none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'grpc'; allowed: http/protobuf"),
    ],
)
def test_what_is_not_there_is_refused_at_the_start(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(TracingError, match=expected):
        tracing_from(environment)
