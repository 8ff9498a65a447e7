"""What failed while a request was served, and was perhaps made up for elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.control.choice import Choice
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.legs import DecodeFailed, Failure, PrefillFailed
from pdrt.errors import PeerLost, TransferFailed

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
    """Whom to avoid, which need not be who says so.

    Whoever is left of a transfer tells of the other one's death, perhaps before the other one's own
    instance does: the stage is the role that was lost. And decode tells of transfers that failed,
    which is prefill's doing.
    """
    error = event.failure.error
    lost = error.stage if isinstance(error, PeerLost) else ""
    if isinstance(event, PrefillFailed):
        is_prefills = lost != "decode"
    else:
        is_prefills = lost == "prefill" or isinstance(error, TransferFailed)
    return choice.prefill if choice.prefill and is_prefills else choice.decode
