"""Boards of racktwin for Grafana: each a list of panels, made into JSON by the Grafana Foundation SDK."""
