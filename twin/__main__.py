"""`python -m twin` is the same as the command `racktwin`."""

import sys

from twin.cli.main import main

sys.exit(main())
