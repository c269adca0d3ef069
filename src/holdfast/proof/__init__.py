"""What proves that nothing gets lost: crash points, conservation checker, cutting proxy, process killer.

Only the crash points are imported here, because the program itself passes them; the rest is for whoever
does the proving, and is imported by its module.
"""

from holdfast.proof.crash import crash_point

__all__ = ["crash_point"]
