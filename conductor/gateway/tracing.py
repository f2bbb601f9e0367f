"""OpenTelemetry spans of one generation, and the W3C trace context that came with it.

    POST /v1/chat/completions       the request at the gateway
      prepare                       body, template, tokens, hashes
      wait                          for the turn at the cluster
      decide                        submission to placement or refusal
      first_token                   placement to first token, with the predicted time of queue, pull and prefill
        queue                       until the prefill worker begins to compute
        pull                        meanwhile: the prefix comes from another worker or tier
        prefill                     until the prompt is computed
      hand_over                     first token (prefill worker) to second (decode worker)
      decode                        the rest of the answer

Spans are written when the request has ended, from times noted on the way, so tokens cost nothing. Everything is configured by
the standard OTEL_* variables, read once by `tracing_from`: without an exporter or an OTLP endpoint among them there are no
spans, and the trace context of a client is only passed back. What happened between placement and first token is asked of the
Conductor when the answer has gone out, and left away where it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from conductor.core.types import Placement, TTFTEstimate
from conductor.gateway.generation import Choice, Run
from conductor.gateway.plan import Plan

SERVICE_NAME = "conductor-gateway"
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
TRACEPARENT_PATTERN = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
EXPORTERS = ("otlp", "console", "none")
NS_PER_S = 1_000_000_000


class TracingError(ValueError):
    """The OTEL_* variables ask for what is not there."""


def tracing_from(environment: Mapping[str, str]) -> TracerProvider | None:
    """The provider that the variables ask for; None when they ask for none. Sampling, batching, resource and OTLP details are
    read from the environment by the SDK itself. Raises `TracingError`."""
    kind = check_environment(environment)
    if kind == "none":
        return None
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": SERVICE_NAME}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(kind)))
    return provider


def check_environment(environment: Mapping[str, str]) -> str:
    """The kind of exporter that is asked for: otlp, console or none; raises `TracingError` for what there is not."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    default = "otlp" if any(environment.get(name) for name in endpoints) else "none"
    kind = environment.get("OTEL_TRACES_EXPORTER") or default
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "none"
    if kind not in EXPORTERS:
        raise TracingError(f"OTEL_TRACES_EXPORTER is {kind!r}; allowed: {', '.join(EXPORTERS)}")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; allowed: http/protobuf")
    if kind == "otlp" and not _installed("opentelemetry.exporter.otlp.proto.http"):
        raise TracingError("OTLP export needs the extra 'otel': pip install 'kv-conductor[otel]'")
    return kind


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _exporter(kind: str) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def trace_context(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The valid W3C trace context of a request; empty without one. A broken one is ignored, as the standard asks."""
    given = {name: value for name, value in headers if name in (TRACEPARENT, TRACESTATE)}
    parent = given.get(TRACEPARENT)
    if parent is None or not TRACEPARENT_PATTERN.fullmatch(parent):
        return {}
    return {name.decode(): value.decode("latin-1") for name, value in given.items()}


@dataclass(slots=True)
class RequestTrace:
    """Times of one request as they pass. `traceparent` is what the answer carries; `records` are the Conductor's, by job."""

    span: Span
    tracer: Tracer
    started_ns: int
    prepared_ns: int | None = None
    problem_status: int = 200
    run: Run | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def traceparent(self) -> bytes:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self.span))
        return carrier["traceparent"].encode()

    @property
    def unexplained(self) -> Plan | None:
        """The plan whose records the spans have use for."""
        return self.run.plan if self.run is not None and self.span.is_recording() else None

    def prepared(self, run: Run) -> None:
        """The body is read and planned."""
        self.prepared_ns = monotonic_ns()
        self.run = run

    def end(self) -> None:
        """Write the spans."""
        now_ns = monotonic_ns()
        to_epoch_ns = time_ns() - now_ns
        for part in self._parts():
            self._write(part, self.span, to_epoch_ns)
        self.span.set_attribute("http.response.status_code", self.problem_status)
        if self.problem_status >= 500:
            self.span.set_status(Status(StatusCode.ERROR))
        if self.run is not None:
            self.span.set_attributes(request_attributes(self.run))
        self.span.end(now_ns + to_epoch_ns)

    def _write(self, part: Part, parent: Span, to_epoch_ns: int) -> None:
        context, start_ns = set_span_in_context(parent), part.start_ns + to_epoch_ns
        span = self.tracer.start_span(part.name, context, attributes=part.attributes, start_time=start_ns)
        for within in part.within:
            self._write(within, span, to_epoch_ns)
        span.end(part.end_ns + to_epoch_ns)

    def _parts(self) -> Iterator[Part]:
        if self.prepared_ns is None or self.run is None:
            return
        yield Part("prepare", self.started_ns, self.prepared_ns)
        submissions = [choice.times.submitted_s for choice in self.run.choices if choice.times.submitted_s is not None]
        if submissions:
            yield Part("wait", self.prepared_ns, _ns(min(submissions)))
        for choice in self.run.choices:
            yield from parts_of(choice, self.records.get(choice.job.request.id, {}))


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    within: tuple[Part, ...] = ()


def request_attributes(run: Run) -> dict[str, str | int]:
    request = run.plan.jobs[0].request
    return {
        "conductor.request_id": run.plan.id,
        "conductor.tenant": request.tenant,
        "conductor.reused_tokens": run.reused_tokens,
        "gen_ai.request.model": request.model,
        "gen_ai.usage.input_tokens": run.plan.prompt_tokens,
        "gen_ai.usage.output_tokens": run.output_tokens,
    }


def parts_of(choice: Choice, record: Mapping[str, Any]) -> Iterator[Part]:
    """What is known of one choice: as many parts as it reached."""
    times, request = choice.times, choice.job.request
    name = {"conductor.request_id": request.id}
    if times.submitted_s is None or times.decided_s is None:
        return
    yield Part("decide", _ns(times.submitted_s), _ns(times.decided_s), name | decision_attributes(choice))
    if times.first_token_s is None or choice.placement is None:
        return
    span_s = times.submitted_s, times.decided_s, times.first_token_s
    within = prefill_parts(*span_s, record)
    yield Part("first_token", _ns(times.decided_s), _ns(times.first_token_s), name | prefill_attributes(choice), within)
    decoding_s = times.first_token_s
    if times.second_token_s is not None and choice.placement.decode not in (None, choice.placement.prefill):
        worker = {"conductor.decode_worker": choice.placement.decode or ""}
        yield Part("hand_over", _ns(times.first_token_s), _ns(times.second_token_s), name | worker)
        decoding_s = times.second_token_s
    if times.ended_s is not None:
        attributes: dict[str, str | int | float] = {**name, "gen_ai.usage.output_tokens": choice.assembler.output_tokens}
        yield Part("decode", _ns(decoding_s), _ns(times.ended_s), attributes)


def prefill_parts(submitted_s: float, decided_s: float, first_token_s: float, record: Mapping[str, Any]) -> tuple[Part, ...]:
    """From the record of a request that was placed once. The Conductor's times begin with the arrival there, a moment after the
    submission here, and its news travels apart from the tokens: a part never reaches beyond what was seen here."""
    actual = record.get("actual", {})
    told = actual.get("prefill_started_s"), actual.get("prefill_finished_s")
    if None in told or record["attempt"] != 1:
        return ()
    began_s, ended_s = (min(max(submitted_s + since_s, decided_s), first_token_s) for since_s in told)
    compute = {"conductor.compute_s": actual["prefill_compute_s"]}
    parts = Part("queue", _ns(decided_s), _ns(began_s)), Part("prefill", _ns(began_s), _ns(ended_s), compute)
    if (fetch_s := actual.get("fetch_s")) is None:
        return parts
    return *parts, Part("pull", _ns(decided_s), _ns(min(decided_s + fetch_s, began_s)))


def decision_attributes(choice: Choice) -> dict[str, str | int | float]:
    placement = choice.placement
    if placement is None:
        return {"conductor.outcome": "rejected"}
    workers = {"conductor.prefill_worker": placement.prefill, "conductor.decode_worker": placement.decode or ""}
    return {"conductor.outcome": "placed", **workers}


def prefill_attributes(choice: Choice) -> dict[str, str | int | float]:
    placement = choice.placement
    assert placement is not None
    return {
        "conductor.prefill_worker": placement.prefill,
        "conductor.reused_tokens": choice.reused_tokens,
        **predicted(placement, placement.ttft),
    }


def predicted(placement: Placement, ttft: TTFTEstimate) -> dict[str, str | int | float]:
    return {
        "conductor.predicted.queue_s": ttft.queue_s,
        "conductor.predicted.transfer_s": ttft.transfer_s,
        "conductor.predicted.prefill_s": ttft.prefill_s,
        "conductor.predicted.reused_tokens": placement.reuse.reused_tokens,
    }


def _ns(monotonic_s: float) -> int:
    return round(monotonic_s * NS_PER_S)


class Tracing:
    """Begins traces; without a provider it only passes contexts back."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = None if provider is None else provider.get_tracer("conductor.gateway")
        self._provider = provider

    def begin(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestTrace | None:
        """None when nobody wants spans."""
        if self._tracer is None:
            return None
        parent = TraceContextTextMapPropagator().extract(trace_context(headers))
        span = self._tracer.start_span(
            f"POST {path}",
            parent,
            SpanKind.SERVER,
            {"http.request.method": "POST", "url.path": path},
        )
        return RequestTrace(span, self._tracer, monotonic_ns())

    def close(self) -> None:
        """Send what has not been sent."""
        if self._provider is not None:
            self._provider.shutdown()
