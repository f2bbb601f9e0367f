"""From a validated body to the jobs of one request: tokens, limits, sampling, block hashes, ids.

A request asks for `prompts x n` choices; each choice is one `GenerationJob` of its own. Prompts that share a prefix find each
other's KV through the scheduler, so nothing is shared here. Sampling seeds that the client leaves open are drawn once, so
that a request placed again after a lost worker goes on as it began.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from conductor.core.hashing import TOKEN_BYTES
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.types import Request, cache_domain
from conductor.gateway.errors import ApiError, invalid
from conductor.gateway.fields import Prompt
from conductor.gateway.hints import Hints
from conductor.gateway.ids import unique_hex
from conductor.gateway.schemas import SEED_LIMIT, GenerationBody, Message
from conductor.gateway.served_model import ServedModel
from conductor.gateway.settings import GatewaySettings

USUAL_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks, how, and where the output must come back to."""

    hints: Hints
    tenant: str
    channel: str
    sharing_group: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the cluster is asked. `jobs[i]` is choice i of the answer."""

    id: str
    jobs: tuple[GenerationJob, ...]
    prompts: int
    prompt_tokens: int
    stops: tuple[str, ...]
    silent_ids: frozenset[int]

    @property
    def cost_tokens(self) -> int:
        """What the request is expected to take of the cluster: its prompts, and answers as long as usual or as their limit."""
        requests = [job.request for job in self.jobs]
        return self.prompt_tokens + sum(min(each.max_output_tokens, USUAL_OUTPUT_TOKENS) for each in requests)


def check_model(name: str, served: ServedModel) -> None:
    if name not in served.names:
        raise invalid("model", name, ", ".join(served.names), "model_not_found")


def tokenize(prompt: Prompt, served: ServedModel, *, special: bool) -> Sequence[int]:
    """Token ids of a prompt of either form, checked against the vocabulary."""
    if isinstance(prompt, str):
        return served.tokenizer.encode(prompt, special=special)
    vocab_size = served.tokenizer.vocab_size
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise invalid("prompt", token_id, f"token ids from 0 to {vocab_size - 1}")
    return prompt


def chat_prompt(messages: Sequence[Message], served: ServedModel) -> str:
    """A conversation as the model's template writes it; raises `ApiError` 400 when the template does not take it."""
    try:
        return served.tokenizer.render_chat([message.for_template() for message in messages])
    except ValueError as problem:
        detail = f"the model's chat template refuses 'messages': {problem}"
        raise ApiError(400, detail, "invalid_messages", param="messages") from None


def new_id(prefix: str) -> str:
    return f"{prefix}-{unique_hex()}"


class Planner:
    """Turns bodies into plans for one served model."""

    def __init__(self, served: ServedModel, settings: GatewaySettings) -> None:
        self._served = served
        self._settings = settings

    def plan(self, request_id: str, body: GenerationBody, prompts: Sequence[Sequence[int]], origin: Origin) -> Plan:
        """Raises `ApiError` 400 for prompts and limits that cannot be served."""
        choices = body.n or 1
        total = len(prompts) * choices
        if total > self._settings.max_choices:
            raise invalid("n", choices, f"prompts times n up to {self._settings.max_choices}; this is {total}")
        seed = random.getrandbits(63) if body.seed is None else body.seed % SEED_LIMIT
        jobs: list[GenerationJob] = []
        for tokens in prompts:
            packed = struct.pack(f"<{len(tokens)}i", *tokens)
            request_as = self._request(body, packed, origin)
            limit = self._output_limit(body, len(tokens))
            for _ in range(choices):
                job_id = request_id if total == 1 else f"{request_id}-{len(jobs)}"
                sampling = self._sampling(body, limit, (seed + len(jobs)) % SEED_LIMIT)
                request = request_as(id=job_id, max_output_tokens=limit)
                jobs.append(GenerationJob(request, packed, sampling, origin.channel))
        silent = frozenset(jobs[0].sampling.stop_token_ids)
        return Plan(request_id, tuple(jobs), len(prompts), sum(map(len, prompts)), body.stop, silent)

    def _request(self, body: GenerationBody, packed: bytes, origin: Origin) -> Callable[..., Request]:
        """Makes requests that differ in id and output limit."""
        return partial(
            Request,
            prompt_tokens=len(packed) // TOKEN_BYTES,
            block_hashes=self._served.hash_prompt(packed, cache_domain(origin.tenant, origin.sharing_group)),
            slo=origin.hints.slo,
            priority=origin.hints.priority,
            traffic_class=origin.hints.traffic_class,
            session=origin.hints.session or body.session,
            tenant=origin.tenant,
            model=self._served.name,
            sharing_group=origin.sharing_group,
        )

    def _output_limit(self, body: GenerationBody, prompt_tokens: int) -> int:
        context = self._served.max_context
        wanted = body.output_limit
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt is empty; allowed: at least one token", "empty_prompt", param="prompt")
        if prompt_tokens + (wanted or 1) > context:
            asked = "at least 1 token" if wanted is None else f"{wanted} tokens"
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens and the answer may take {asked}; allowed: {context} together",
                "context_length_exceeded",
                param="prompt" if prompt_tokens >= context else "max_tokens",
            )
        return context - prompt_tokens if wanted is None else wanted

    def _sampling(self, body: GenerationBody, limit: int, seed: int) -> SamplingParams:
        eos = () if body.ignore_eos else tuple(self._served.tokenizer.eos_ids)
        return SamplingParams(
            max_tokens=limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            seed=seed,
            stop_token_ids=tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ())))),
            logprobs=body.alternatives,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        )
