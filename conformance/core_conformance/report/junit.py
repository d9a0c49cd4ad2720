"""A report as JUnit XML, as GitLab, Jenkins and GitHub's actions read it: a suite per area, a test case per case."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from core_conformance.case import AREAS
from core_conformance.outcome import Outcome
from core_conformance.report.overview import headline, one_line, printable, ratio_text
from core_conformance.report.report import Report

# What the three readers have elements for; the message tells which status it was.
_ELEMENTS = {
    "fail": "failure",
    "xpass": "failure",
    "crash": "error",
    "timeout": "error",
    "not-supported": "skipped",
    "xfail": "skipped",
    "skip": "skipped",
}
_MAX_MEASUREMENTS = 200


def to_junit(report: Report) -> str:
    """Return the XML document. Expected failures and what is declared not supported are skipped, with the reason."""
    report = printable(report)
    root = ElementTree.Element("testsuites", name=f"core conformance {report.name}")
    _count(root, report.outcomes, report.elapsed_s)
    for area in AREAS:
        outcomes = [outcome for outcome in report.outcomes if outcome.area == area]
        if outcomes:
            suite = ElementTree.SubElement(root, "testsuite", name=area, timestamp=report.started)
            _count(suite, outcomes, sum(outcome.elapsed_s for outcome in outcomes))
            _properties(suite, report)
            for outcome in outcomes:
                _case(suite, report, outcome)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _count(element: ElementTree.Element, outcomes: Sequence[Outcome], elapsed_s: float) -> None:
    elements = [_ELEMENTS.get(outcome.status) for outcome in outcomes]
    element.set("tests", str(len(elements)))
    for attribute, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(elements.count(name)))
    element.set("time", f"{elapsed_s:.3f}")


def _properties(suite: ElementTree.Element, report: Report) -> None:
    environment = report.environment
    facts = {
        "device": report.name,
        "product": environment.device_name,
        "plugin": "" if report.plugin is None else str(report.plugin),
        "result": headline(report).lower(),
        "suite": report.suite,
        "driver": environment.driver,
        "platform": environment.platform,
        "seed": str(report.seed),
        **{f"version of {name}": number or "not installed" for name, number in environment.versions.items()},
    }
    parent = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(parent, "property", name=name, value=one_line(value))


def _case(suite: ElementTree.Element, report: Report, outcome: Outcome) -> None:
    classname = f"conformance.{report.name}.{outcome.area}"
    time = f"{outcome.elapsed_s:.3f}"
    case = ElementTree.SubElement(suite, "testcase", name=outcome.id, classname=classname, time=time)
    if outcome.status in _ELEMENTS:
        message = f"{outcome.status}: {one_line(outcome.reason)}" if outcome.reason else outcome.status
        found = ElementTree.SubElement(case, _ELEMENTS[outcome.status], message=message, type=outcome.status)
        found.text = outcome.detail or outcome.reason
    ElementTree.SubElement(case, "system-out").text = "\n".join(_lines(report, outcome))


def _lines(report: Report, outcome: Outcome) -> list[str]:
    lines = [report.cases.get(outcome.id, ""), f"again: {report.repro(outcome)}", *outcome.notes]
    for item in outcome.measurements[:_MAX_MEASUREMENTS]:
        reason = f": {one_line(item.reason)}" if item.reason else ""
        lines.append(f"{item.criterion} {item.name} ratio {ratio_text(item.ratio)}{reason}")
    if len(outcome.measurements) > _MAX_MEASUREMENTS:
        lines.append(f"and {len(outcome.measurements) - _MAX_MEASUREMENTS} more measurements")
    return lines
