"""The gateway over a null engine in a process of its own: `python -m tests.bench.null_gateway TOKENS TBT_S` prints its port."""

from __future__ import annotations

import sys

from conductor.gateway import GatewaySettings, ServedModel, create_app
from conductor.gateway.server import bind, make_server, spare_the_collector
from tests.bench.null_engine import NullEngine
from tests.doubles.byte_tokenizer import ByteTokenizer

CONTEXT = 8192


def main() -> None:
    engine = NullEngine(int(sys.argv[1]), float(sys.argv[2]))
    served = ServedModel(("null",), CONTEXT, ByteTokenizer(), lambda tokens, tenant: ())
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    server = make_server(create_app(engine, served, GatewaySettings()))
    spare_the_collector()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
