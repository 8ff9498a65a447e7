"""What failed while a request was served, and was perhaps made up for elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.control.choice import Choice
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.legs import DecodeFailed, Failure, PrefillFailed
from pdrt.errors import TransferFailed

Failed: TypeAlias = PrefillFailed | DecodeFailed


@dataclass(slots=True)
class Setback:
    at: float
    choice: Choice  # that did not work out
    culprit: Instance
    failure: Failure

    def told(self, since: float) -> Json:
        choice, error = self.choice, self.failure.error
        return {
            "ms": round((self.at - since) * 1e3, 1),
            "prefill": choice.prefill.name if choice.prefill else None,
            "decode": choice.decode.name,
            "because": choice.because.told() if choice.because else None,
            "culprit": self.culprit.name,
            "code": error.code,
            "message": str(error),
            "stage": error.stage or None,
        }


def culprit_of(event: Failed, choice: Choice) -> Instance:
    """Whom to avoid: decode also reports what its prefill side did."""
    is_transfer = isinstance(event.failure.error, TransferFailed)
    if choice.prefill and (isinstance(event, PrefillFailed) or is_transfer):
        return choice.prefill
    return choice.decode
