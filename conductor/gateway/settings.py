"""What an operator may set on the gateway. Every value is checked when the settings are built; a bad one raises `ValueError`
naming the field, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from conductor.gateway.keys import KEY_HASH_PATTERN
from conductor.gateway.logs import LogFormat, LogLevel


class GatewaySettings(BaseModel):
    """Limits and defaults of one gateway process.

    Objectives that a request does not name itself are `default_*_slo_s`; None means that there are none.
    `max_in_flight` requests have their turn at the cluster; of every tenant `max_waiting` more may wait for one, up to
    `max_wait_s`. Without a `keys_file` no key is asked for. `admin_port` None leaves the admin endpoints closed; `admin_key`
    is the hash of the operator's key. Prompts of more than `inline_tokenize_chars` characters are tokenized off the event loop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    keys_file: Path | None = None
    files_check_s: float = Field(default=1.0, gt=0, description="how often changed keys and certificates are looked for")
    admin_host: str = "127.0.0.1"
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    admin_key: Annotated[str, StringConstraints(pattern=KEY_HASH_PATTERN)] | None = None
    dashboard_period_s: float = Field(default=1.0, ge=0.05, description="how often the dashboard is brought up to date")
    log_format: LogFormat = "text"
    log_level: LogLevel = Field(default="warning", description="info adds a line for each answer")
    default_ttft_slo_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    default_tbt_slo_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_connections: int = Field(default=8192, ge=1)
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    header_timeout_s: float = Field(default=10.0, gt=0)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    send_timeout_s: float = Field(default=60.0, gt=0)
    max_in_flight: int = Field(default=2048, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    max_choices: int = Field(default=16, ge=1, le=128)
    inline_tokenize_chars: int = Field(default=4096, ge=0)
    keep_alive_comment_s: float = Field(default=15.0, gt=0)
    drain_timeout_s: float = Field(default=60.0, ge=0)
    overload_retry_after_s: float = Field(default=1.0, gt=0)
    unavailable_retry_after_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _pairs_are_complete(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file are allowed only together")
        if self.admin_port is not None and self.admin_key is None:
            raise ValueError("admin_port is set and admin_key is not; allowed: the hash that `conductor key new` prints")
        return self
