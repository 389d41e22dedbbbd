"""racktwin: a digital twin that watches, forecasts and steers AI supernodes."""

VERSION = "0.1.0"  # as in pyproject.toml, which a test compares
