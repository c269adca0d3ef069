"""The documented place of `Fingerprint`, for functions of one's own that group letters; see `holdfast.core.letter`."""

from holdfast.core.letter import Fingerprint

__all__ = ["Fingerprint"]
