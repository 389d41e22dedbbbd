"""`python -m twin.app` is the same as the command `racktwin`."""

import sys

from twin.app.cli import main

sys.exit(main())
