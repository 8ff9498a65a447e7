"""Whether requests are traced: only with an endpoint, and with the package that sends traces."""

from __future__ import annotations

from importlib.util import find_spec

from pdrt.config import TelemetrySection
from pdrt.control.traces import Tracing
from pdrt.errors import ConfigError


def open_tracing(telemetry: TelemetrySection, service: str, instance: str) -> Tracing | None:
    """None when it is off. Raises ConfigError when the package is not there."""
    endpoint = telemetry.otlp_endpoint
    if not endpoint:
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            f"[telemetry] otlp_endpoint = {endpoint!r}: OpenTelemetry is not installed:"
            " pip install 'pdrt[otel]'"
        )
    from pdrt.control.otel import open_otlp

    return open_otlp(endpoint, telemetry.sample, service, instance)
