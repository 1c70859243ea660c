"""Figures and the HTML report, drawn from saved records only: nothing here trains or measures.

``records.Records`` is what a demo or a comparison leaves on disk; ``report.render`` turns it into one
self-contained page (inline SVG, no request leaves the file). Drawing needs matplotlib
and jinja2 (``hotrain[plot]``); the records do not.
"""

from hotrain.plotting.records import Records, load_records

__all__ = ["Records", "load_records"]
