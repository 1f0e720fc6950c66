"""The report: one self-contained HTML file from a result file and the videos beside it."""

from rollcache.bench.report.render import media, render, write_report

__all__ = ["media", "render", "write_report"]
