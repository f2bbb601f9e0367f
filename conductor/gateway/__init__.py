"""The HTTP front end: the OpenAI API over an `EngineClient`.

Validates, renders the chat template, tokenizes, hashes, submits, and turns tokens back into text. It knows the cluster
through `conductor.engine_client` alone and loads neither torch nor ray.
"""

from conductor.gateway.app import create_app
from conductor.gateway.served_model import ServedModel
from conductor.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings", "ServedModel", "create_app"]
