"""The demo's folder is the demo's own; its proof holds; what a run, a recorder and the examples say of themselves."""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from rich.console import Console

from tests.golden.story import Story
from twin.app import config as schema
from twin.app import record
from twin.app.acl import acl_text, identities
from twin.app.cli import main
from twin.app.compare import said_simulated
from twin.app.config import load_config
from twin.app.demo_live import MARKER, OURS, _prove, claimed
from twin.app.replay import Keeping, Recorder, replay_frames
from twin.app.report_figures import doubt
from twin.app.storage import TraceReader
from twin.errors import ConfigError, StorageError
