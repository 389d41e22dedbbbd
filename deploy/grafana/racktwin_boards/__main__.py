"""Writes the boards as JSON into a folder: `python -m racktwin_boards FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from racktwin_boards.all_boards import BOARDS


def main() -> None:
    """Write one file for each board."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m racktwin_boards FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.name}.json").write_text(board.document(), encoding="utf-8")


if __name__ == "__main__":
    main()
