"""Connectors: the world outside, one package per system; the only place where units are converted."""
