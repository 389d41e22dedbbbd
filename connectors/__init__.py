"""Connectors: one package per external system. Units are converted only here."""
