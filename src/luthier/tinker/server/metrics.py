"""What the server counts, for Prometheus, and says, for its log: one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from luthier.tinker.server.records import Operation

logger = logging.getLogger(__name__)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._operations = Counter(
            "luthier_operations", "Operations that ended.", ["kind", "status"], registry=self._registry
        )
        self._waiting = Gauge("luthier_operations_waiting", "Operations under way.", registry=self._registry)
        self._seconds = Histogram(
            "luthier_operation_seconds",
            "From the request to the result, waiting included.",
            ["kind"],
            buckets=(0.05, 0.2, 1, 5, 20, 60, 300, 1800),
            registry=self._registry,
        )
        self._tokens = Counter("luthier_sampled_tokens", "Tokens that were sampled.", registry=self._registry)
        self._polls = Gauge("luthier_polls", "Clients that wait for a result.", registry=self._registry)
        self._sessions = Gauge("luthier_sessions", "Sessions with a client at their end.", registry=self._registry)
        self._responses = Counter(
            "luthier_http_responses", "Responses by status code.", ["code"], registry=self._registry
        )
        self._under_way = 0

    def waiting(self) -> int:
        """Operations under way."""
        return self._under_way

    def submitted(self, operation: Operation) -> None:
        """One more is under way."""
        if operation.status == "waiting":
            self._under_way += 1
            self._waiting.set(self._under_way)

    def resumed(self, operations: int) -> None:
        """So many were under way when the server before this one ended."""
        self._under_way += operations
        self._waiting.set(self._under_way)

    def finished(self, operation: Operation) -> None:
        """One has ended."""
        self._under_way -= 1
        self._waiting.set(self._under_way)
        self._operations.labels(operation.kind, operation.status).inc()
        seconds = time.time() - operation.created
        self._seconds.labels(operation.kind).observe(seconds)
        told = {"operation": operation.id, "kind": operation.kind, "seconds": round(seconds, 3)}
        if operation.status == "failed":
            logger.warning("failed", extra={"fields": told | {"error": operation.error}})
        else:
            logger.info("done", extra={"fields": told})

    def sampled(self, tokens: int) -> None:
        """So many tokens were sampled."""
        self._tokens.inc(tokens)

    def polls(self, change: int) -> None:
        """So many more clients wait, or fewer."""
        self._polls.inc(change)

    def sessions(self, count: int) -> None:
        """So many sessions have a client."""
        self._sessions.set(count)

    def responded(self, code: int) -> None:
        """A response was sent."""
        self._responses.labels(str(code)).inc()

    def crashed(self, error: BaseException) -> None:
        """Something of the server's own went wrong."""
        logger.error("a fault of the server's own", exc_info=error)

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        return generate_latest(self._registry)


class JsonLines(logging.Formatter):
    """A record as one JSON object; what is passed as `fields` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)
