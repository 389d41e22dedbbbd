"""racktwin's core, and under `twin.app` the shell around it. The map is in `twin/README.md`."""

VERSION = "0.1.0"  # as in pyproject.toml, which a test compares
