"""How long an output will be, learned per traffic class from what has finished; bounded by what the request allows.

Output lengths are not known on arrival. An average per class is enough to reserve decode capacity and to predict load;
predicting single requests is beyond what the paper did (arXiv v3, section 7.4).
"""

from __future__ import annotations

from conductor.core.types import Request

LEARNING_RATE = 0.05
UNKNOWN_CLASS_TOKENS = 1024.0


class OutputLengths:
    def __init__(self) -> None:
        self._mean_tokens: dict[str, float] = {}

    def expected_tokens(self, request: Request) -> int:
        """Output tokens still to come, at least 1."""
        learned = self._mean_tokens.get(request.traffic_class, UNKNOWN_CLASS_TOKENS) - request.emitted_tokens
        return max(1, min(request.max_output_tokens, round(learned)))

    def observe(self, traffic_class: str, output_tokens: int) -> None:
        known = self._mean_tokens.get(traffic_class)
        self._mean_tokens[traffic_class] = (
            float(output_tokens) if known is None else known + LEARNING_RATE * (output_tokens - known)
        )
