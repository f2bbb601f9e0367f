"""What a replay asks of an endpoint before it starts: which model it serves and which token ids that model has."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import httpx

from traces.synthesize import TokenRange

CONNECT_TIMEOUT_S = 10.0


class EndpointError(RuntimeError):
    """The endpoint cannot be replayed against; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and one of its models."""

    model: str
    vocabulary_tokens: int | None


def http_client(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    """A client without limits on connections, so that it never queues by itself.

    Proxies of the environment are honoured, except towards this host.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(
        base_url=_root(url), headers=headers, limits=limits, timeout=timeout, trust_env=not _is_loopback(url)
    )


async def ask_endpoint(http: httpx.AsyncClient, model: str | None) -> Endpoint:
    """The endpoint's model `model`, or its first. Raises EndpointError."""
    try:
        response = await http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        response.raise_for_status()
        entries = [entry for entry in response.json()["data"] if isinstance(entry["id"], str)]
    except httpx.HTTPStatusError as error:
        message = f"{http.base_url} answers /v1/models with {error.response.status_code}; allowed: 200"
        raise EndpointError(message) from error
    except httpx.HTTPError as error:
        raise EndpointError(f"{http.base_url} does not answer ({type(error).__name__}: {error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EndpointError(f"{http.base_url} answers /v1/models with something other than a model list") from error
    chosen = [entry for entry in entries if model in (None, entry["id"])]
    if not chosen:
        names = ", ".join(entry["id"] for entry in entries) or "no model at all"
        raise EndpointError(f"model is {model!r}; {http.base_url} serves {names}")
    vocabulary = chosen[0].get("vocab_size")
    return Endpoint(chosen[0]["id"], vocabulary if type(vocabulary) is int and vocabulary > 1 else None)


def fitting_range(wanted: TokenRange, vocabulary_tokens: int | None) -> TokenRange:
    """`wanted`, cut to the middle of a vocabulary that is smaller: special tokens sit at either end."""
    if vocabulary_tokens is None or wanted.high <= vocabulary_tokens:
        return wanted
    edge = vocabulary_tokens // 16
    return TokenRange(edge, max(edge + 1, vocabulary_tokens - edge))


def _root(url: str) -> str:
    """The server's root: a URL that ends in /v1 is taken as well."""
    return url.rstrip("/").removesuffix("/v1")


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
