"""Send spans to a collector by OTLP, and say once when it takes none.

tracing.py imports this module only where there is a collector to send to: it needs the extra otlp.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from foretoken.address import UNIX_PREFIX

logger = logging.getLogger(__name__)


class CollectorExporter(SpanExporter):
    """Exports spans; a collector that is slow, refuses or is not there costs spans and one line.

    Only the thread of the SDK's batch processor calls ``export``. If the endpoint is a Unix socket
    that does not exist, no collector is wanted: spans are dropped without a line.
    """

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: http://host:port, https://host:port or unix:/path."""
        path = endpoint.removeprefix(UNIX_PREFIX)
        self._endpoint = endpoint
        self._socket = path if path != endpoint else None
        self._is_failing = False
        # It writes a line for each batch and each retry.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
        # None: the scheme decides.
        self._exporter = OTLPSpanExporter(endpoint, insecure=True if self._socket else None)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._socket is not None and not os.path.exists(self._socket):
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning("the collector at %s takes no spans; they are dropped until it does", self._endpoint)
        elif self._is_failing and not is_failing:
            logger.info("the collector at %s takes spans again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
