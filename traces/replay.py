"""Replay a trace: `replay_live` against an HTTP endpoint, `replay_simulated` in virtual time. Both hand back a `RunResult`.

Live replay is an open loop: a request leaves at `(timestamp - first timestamp) / speed`, whatever became of the ones before
it. Prompts are prepared ahead of time in a thread, so that a burst does not wait for their making; what lag
remains is measured for every request. `max_concurrency` makes it a closed loop when it is reached, and then shows as lag.
Warm-up requests go first, one after another, and stay out of the figures.

Every request that was taken from the trace has an outcome. A stopped replay cancels what is in flight, counts it and what
was prepared as unfinished, and takes nothing more.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from conductor.core.types import SLO
from traces.live_client import CompletionClient, PreparedRequest
from traces.live_server import ask_endpoint, fitting_range, http_client
from traces.outcomes import OutcomeStatus, Plain, RequestOutcome, RunMode, RunResult, load_max_over_mean
from traces.schema import TraceRequest
from traces.simulator import simulate as replay_simulated
from traces.synthesize import TokenRange, prompt_tokens, scaled

__all__ = ["LiveOptions", "replay_live", "replay_simulated"]

PREPARED_AHEAD = 64
MS_PER_S = 1000
CLASS_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what a header can carry
SESSION_WORD = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How to replay against an endpoint.

    `scale` shrinks lengths and blocks; `timeout_s` bounds one whole request. `send_slo` tells the objectives to the server, so
    that its admission works with them. Session and traffic class of a request are always told; servers that do not know
    the headers ignore them.
    """

    url: str
    model: str | None = None
    speed: float = 1.0
    scale: float = 1.0
    max_concurrency: int | None = None
    warmup: int = 0
    timeout_s: float = 600.0
    slo: SLO = field(default_factory=SLO)
    tokens: TokenRange = field(default_factory=TokenRange)
    ignore_eos: bool = True
    send_slo: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("speed", "scale", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: a number above 0")
        for name, objective_s in (("ttft_s", self.slo.ttft_s), ("tbt_s", self.slo.tbt_s)):
            if objective_s is not None and not objective_s > 0:
                raise ValueError(f"slo.{name} is {objective_s}; allowed: a number above 0, or None")
        for name, least in (("warmup", 0), ("max_concurrency", 1)):
            count = getattr(self, name)
            if count is not None and count < least:
                raise ValueError(f"{name} is {count}; allowed: {least} or more")


Progress = Callable[[RequestOutcome], None]


async def replay_live(
    trace: Iterable[TraceRequest],
    options: LiveOptions,
    *,
    name: str = "trace",
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> RunResult:
    """Send `trace` to `options.url`; `progress` sees every outcome as it comes, `stop` ends the replay early.

    Raises EndpointError when the endpoint does not tell its model.
    """
    started_s = time.monotonic()
    stop = stop or asyncio.Event()
    async with http_client(options.url, dict(options.headers)) as http:
        endpoint = await ask_endpoint(http, options.model)
        client = CompletionClient(http, time.monotonic, options.timeout_s)
        options = replace(options, model=endpoint.model, tokens=fitting_range(options.tokens, endpoint.vocabulary_tokens))
        run = _LiveRun(client, options, stop, progress)
        prepared = _prepare(trace, options)
        await run.warm_up(islice(prepared, options.warmup))
        await run.send_all(prepared)
    return RunResult(
        mode=RunMode.LIVE,
        trace=name,
        slo=options.slo,
        outcomes=tuple(sorted(run.outcomes, key=lambda outcome: outcome.index)),
        duration_s=run.duration_s,
        wall_s=time.monotonic() - started_s,
        settings=_settings(options),
        load_max_over_mean=load_max_over_mean(run.outcomes),
        interrupted=stop.is_set(),
    )


def _prepare(trace: Iterable[TraceRequest], options: LiveOptions) -> Iterator[PreparedRequest]:
    """Requests with their bodies made. `due_s` counts from the first request behind the warm-up."""
    origin_s: float | None = None
    for index, original in enumerate(trace):
        request = scaled(original, options.scale)
        warmup = index < options.warmup
        if origin_s is None and not warmup:
            origin_s = request.timestamp_s
        yield PreparedRequest(
            index=index,
            due_s=0.0 if origin_s is None else (request.timestamp_s - origin_s) / options.speed,
            input_tokens=request.input_tokens,
            body=_body(request, index, options),
            headers=_hints(request, options),
            traffic_class=request.traffic_class,
            warmup=warmup,
        )


def _body(request: TraceRequest, index: int, options: LiveOptions) -> bytes:
    fields: dict[str, object] = {
        "model": options.model,
        "prompt": prompt_tokens(request, index, options.tokens),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return json.dumps(fields, separators=(",", ":")).encode()


def _hints(request: TraceRequest, options: LiveOptions) -> dict[str, str]:
    """Headers that tell Conductor's gateway what the trace knows."""
    hints: dict[str, str] = {}
    if request.session is not None and SESSION_WORD.fullmatch(request.session):
        hints["x-conductor-session"] = request.session
    if request.traffic_class is not None and CLASS_WORD.fullmatch(request.traffic_class):
        hints["x-conductor-class"] = request.traffic_class
    if options.send_slo and options.slo.ttft_s is not None:
        hints["x-conductor-ttft-slo-ms"] = f"{options.slo.ttft_s * MS_PER_S:g}"
    if options.send_slo and options.slo.tbt_s is not None:
        hints["x-conductor-tbt-slo-ms"] = f"{options.slo.tbt_s * MS_PER_S:g}"
    return hints


class _LiveRun:
    """Sends prepared requests when they are due and collects their outcomes.

    A request is pending from the moment it is taken until its outcome is recorded, so none can get lost between the two.
    """

    def __init__(self, client: CompletionClient, options: LiveOptions, stop: asyncio.Event, progress: Progress | None) -> None:
        self._client = client
        self._stop = stop
        self._progress = progress
        limit = options.max_concurrency
        self._gate = nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._origin_s = time.monotonic()
        self._pending: dict[int, PreparedRequest] = {}
        self.outcomes: list[RequestOutcome] = []
        self.duration_s = 0.0

    async def warm_up(self, prepared: Iterator[PreparedRequest]) -> None:
        """Send one after another; then start the replay's clock."""
        for request in prepared:
            self._pending[request.index] = request
            await self._until_stopped([asyncio.create_task(self._send(request))])
            if self._stop.is_set():
                break
        self._give_up_pending()
        self._origin_s = time.monotonic()

    async def send_all(self, prepared: Iterator[PreparedRequest]) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            async with aclosing(_ahead(prepared, self._stop)) as requests:
                async for request in requests:
                    self._pending[request.index] = request
                    await self._wait_until(self._origin_s + request.due_s)
                    if not self._stop.is_set():
                        tasks.append(asyncio.create_task(self._send(request)))
            await self._until_stopped(tasks)
        finally:
            for task in tasks:
                task.cancel()
        self._give_up_pending()
        self.duration_s = time.monotonic() - self._origin_s

    async def _send(self, request: PreparedRequest) -> None:
        async with self._gate:
            self._record(await self._client.send(request))

    def _record(self, outcome: RequestOutcome) -> None:
        del self._pending[outcome.index]
        if outcome.sent_s is not None:
            outcome = replace(outcome, sent_s=outcome.sent_s - self._origin_s)
        self.outcomes.append(outcome)
        if self._progress is not None:
            self._progress(outcome)

    def _give_up_pending(self) -> None:
        for request in list(self._pending.values()):
            self._record(request.outcome(OutcomeStatus.UNFINISHED))

    async def _wait_until(self, moment_s: float) -> None:
        """Sleep until `moment_s`, or until the replay is stopped."""
        delay_s = moment_s - time.monotonic()
        if delay_s > 0 and not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for `tasks`; cancel them once the replay is stopped."""
        if not tasks:
            return
        stopped = asyncio.create_task(self._stop.wait())
        finished = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait((stopped, finished), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not finished.done():
            for task in tasks:
                task.cancel()
        await finished
        for task in tasks:
            if not task.cancelled():
                task.result()


async def _ahead(prepared: Iterator[PreparedRequest], stop: asyncio.Event) -> AsyncGenerator[PreparedRequest, None]:
    """`prepared`, made up to `PREPARED_AHEAD` items ahead in a thread; what was made comes out even when `stop` is set."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1) as maker:
        ahead = deque(loop.run_in_executor(maker, next, prepared, None) for _ in range(PREPARED_AHEAD))
        while ahead and (request := await ahead.popleft()) is not None:
            if not stop.is_set():
                ahead.append(loop.run_in_executor(maker, next, prepared, None))
            yield request


def _settings(options: LiveOptions) -> dict[str, Plain]:
    """What the report keeps of the options; headers may carry secrets and stay out."""
    return {
        "url": options.url,
        "model": options.model,
        "speed": options.speed,
        "scale": options.scale,
        "max_concurrency": options.max_concurrency,
        "warmup": options.warmup,
        "timeout_s": options.timeout_s,
        "token_low": options.tokens.low,
        "token_high": options.tokens.high,
        "ignore_eos": options.ignore_eos,
        "send_slo": options.send_slo,
    }
