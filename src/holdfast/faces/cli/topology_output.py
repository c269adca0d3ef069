"""How plans, applies and imports of a topology read: as JSON for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.topology_diff import Difference, DifferenceKind
from holdfast.core.topology_rules import Hazard
from holdfast.faces.cli.output import Output, plural
from holdfast.ports.topology import ProbeResult
from holdfast.services.topology import Applied, ImportReport, TopologyPlan

_SIGNS = {DifferenceKind.MISSING: "+", DifferenceKind.DIFFERENT: "!", DifferenceKind.SUPERFLUOUS: "-"}
NAMES_COUNT_MAX = 3


def plan_document(plan: TopologyPlan) -> dict[str, object]:
    """A plan or a check as JSON."""
    return {
        "vhost": plan.vhost,
        "version": str(plan.version),
        "clean": plan.is_clean,
        "differences": _differences(plan.differences),
        "remarks": [{"name": remark.name, "reason": remark.reason} for remark in plan.remarks],
        "probes": list(plan.probes),
    }


def applied_document(done: Applied) -> dict[str, object]:
    """An apply as JSON."""
    return {
        "vhost": done.vhost,
        "version": str(done.version),
        "done": done.is_done,
        "created": done.created,
        "deleted": done.deleted,
        "kept": done.kept,
        "remaining": _differences(done.remaining),
        "probes": list(done.probes),
        "failure": done.failure,
    }


def imported_document(done: ImportReport) -> dict[str, object]:
    """An import as JSON."""
    return {
        "vhost": done.vhost,
        "version": str(done.version),
        "created": done.created,
        "remaining": _differences(done.remaining),
        "left_out": done.left_out,
        "hazards": [{"name": hazard.name, "reason": hazard.reason} for hazard in done.hazards],
    }


def show(out: Output, found: TopologyPlan | Applied | ImportReport) -> None:
    """The same in lines."""
    out.say(f"RabbitMQ {found.version}, virtual host '{found.vhost}'")
    match found:
        case TopologyPlan():
            _show_differences(out, found.differences)
            _show_remarks(out, found.remarks)
            _show_probes(out, found.probes)
            if not found.differences:
                out.say("the broker is as the file says")
        case Applied():
            _show_applied(out, found)
        case ImportReport():
            for name in found.created:
                out.say(f"+ {name} was made")
            _show_differences(out, found.remaining)
            for section in found.left_out:
                out.say(f"  left out: {section}")
            for hazard in found.hazards:
                out.say(f"! {hazard}")
            made = plural(len(found.created), "thing")
            left = "nothing differs" if not found.remaining else plural(len(found.remaining), "difference") + " left"
            out.say(f"{made} made; read back: {left}")


def _show_applied(out: Output, done: Applied) -> None:
    for name in done.deleted:
        out.say(f"- {name} was deleted")
    for name in done.created:
        out.say(f"+ {name} was made")
    for name, reason in done.kept.items():
        out.say(f"! '{name}' was not deleted: {reason}")
    _show_differences(out, done.remaining)
    _show_probes(out, done.probes)
    if done.failure:
        out.say(f"! {done.failure}; nothing was made after that")
    if not done.has_changed and done.is_done:
        out.say("nothing was to be done: the broker is as the file says")
    else:
        out.say(f"{plural(len(done.created), 'thing')} made, {plural(len(done.deleted), 'thing')} deleted")


def _show_differences(out: Output, differences: Iterable[Difference]) -> None:
    for difference in differences:
        out.say(f"{_SIGNS[difference.kind]} {difference}")
        if difference.way_out:
            out.say(f"    way out: {difference.way_out}")


def _show_remarks(out: Output, remarks: Iterable[Hazard]) -> None:
    by_reason: dict[str, list[str]] = {}
    for remark in remarks:
        by_reason.setdefault(remark.reason, []).append(remark.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - NAMES_COUNT_MAX} more" if len(names) > NAMES_COUNT_MAX else ""
        out.say(f"  remark: {', '.join(names[:NAMES_COUNT_MAX])}{more}: {reason}")


def _show_probes(out: Output, probes: Iterable[ProbeResult]) -> None:
    arrived = 0
    for probe in probes:
        if probe.outcome == "arrived":
            arrived += 1
        else:
            sign = "!" if probe.outcome == "lost" else " "
            out.say(f"{sign} probe {probe.name}: {probe.outcome}; {probe.reason}")
    if arrived:
        out.say(f"{plural(arrived, 'probe')} arrived")


def _differences(differences: Iterable[Difference]) -> list[dict[str, object]]:
    return [
        {
            "kind": difference.kind.value,
            "what": difference.what,
            "name": difference.name,
            "aspects": list(difference.aspects),
            "way_out": difference.way_out,
        }
        for difference in differences
    ]
