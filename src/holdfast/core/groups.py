"""`holdfast.core.groups.Fingerprint`: the name under which people's own fingerprint functions import it."""

from holdfast.core.letter import Fingerprint as Fingerprint  # noqa: PLC0414 - handed on
