"""Register of boards, in the order of their use."""

from __future__ import annotations

from racktwin_boards.cooling import COOLING
from racktwin_boards.daemon import DAEMON_BOARD
from racktwin_boards.health import HEALTH
from racktwin_boards.overview import OVERVIEW
from racktwin_boards.policies import POLICIES
from racktwin_boards.power import POWER

BOARDS = (OVERVIEW, POWER, COOLING, HEALTH, POLICIES, DAEMON_BOARD)
