"""Healthy sites for the count of false alarms: profiles, sizes, loads and seeds, declared by draw.

What is developed on is drawn from `develop`; a figure that is to be reported comes from `held_back`, whose
seeds, sizes and profiles nothing was ever tuned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from twin.config import spec_of
from twin.plant import Mix
from twin.plant.weather import Weather
from twin.site import Site, SiteSpec, build_site

AIR_NODES = 4  # of an air-cooled rack
CDU_RACKS, LOOP_RACKS, FEED_RACKS = 4, 16, 8  # racks that share a CDU, a facility loop, a pair of feeders
ROOM_PU, SCARCE_PU = 1.3, 0.7  # budget of a feeder over its racks' rated power: never binding, and binding
SEED_STEP = 1000  # between two plants of the same place in the draw


class Profile(NamedTuple):
    """A supernode of the draw: its cooling, and the rated power of a rack of it, W."""

    name: str
    cooling: str
    rack_w: float


class Draw(NamedTuple):
    """The seeds from `first_seed` on, the profiles and the sizes in racks of healthy sites.

    `large_racks` are run only where they are asked for: an hour of one takes many minutes.
    """

    first_seed: int
    profiles: tuple[Profile, ...]
    racks: tuple[int, ...]
    large_racks: tuple[int, ...]


class HealthyRun(NamedTuple):
    """One plant to live through with the twin beside it."""

    profile: Profile
    racks: int
    load: str
    seed: int
    seconds: int
    sensors: str = "fine"
    season: str = "mild"

    @property
    def rack_hours(self) -> float:
        """Exposure of the run."""
        return self.racks * self.seconds / 3600.0


class Choice(NamedTuple):
    """The cells of a draw to run; no racks: all but the large sites."""

    loads: Sequence[str]
    cooling: Sequence[str]
    racks: Sequence[int] = ()
    sensors: Sequence[str] = ("fine",)
    seasons: Sequence[str] = ("mild",)


DRAWS = {
    "develop": Draw(
        40_000,
        (Profile("gb200-nvl72", "liquid", 132e3), Profile("hgx-h100", "air", AIR_NODES * 10.2e3)),
        (1, 8),
        (64, 128),
    ),
    "held_back": Draw(
        50_000_000,
        (
            Profile("gb200-nvl72", "liquid", 132e3),
            Profile("gb300-nvl72", "liquid", 142e3),
            Profile("hgx-h100", "air", AIR_NODES * 10.2e3),
            Profile("air-8gpu", "air", AIR_NODES * 4.5e3),
        ),
        (2, 12, 32),
        (96, 400),
    ),
}
# Jobs of each load; None: no jobs, and levels that `level_steps` sets
LOADS: dict[str, Mix | None] = {
    "idle": Mix(constant_pu=0.0),
    "constant": Mix(constant_pu=0.7),
    "steps": None,
    "training": Mix(1.0, 0.0, 0.0),
    "inference": Mix(0.0, 1.0, 0.0),
    "churn": Mix(0.4, 0.2, 0.4, job_hours=(0.05, 0.3)),
    "capped": Mix(),
    "restarts": Mix(),
    "response": Mix(),
    "maintenance": Mix(),
    "ordinary": Mix(0.4, 0.2, 0.4, job_hours=(0.05, 0.3)),  # single errors, restarts, jobs that crash
    "replaced": Mix(),
    "changed": Mix(),
    "doors": Mix(),
}
POLICIES_ACT = ("capped", "response")  # loads under which our own policies cap power
# Numbered behind the rest, in this order, so that published plants keep their seeds
LATER = {"response": 1, "maintenance": 1, "replaced": 2, "changed": 2, "doors": 2, "ordinary": 3}
SENSORS = ("fine", "coarse", "gaps", "slow")
SEASONS = {
    "mild": Weather(),
    "winter": Weather(mean_c=-5.0, swing_k=4.0, rh_pu=0.8, begin_s=18_000.0, fronts_k=4.0),
    "summer": Weather(mean_c=33.0, swing_k=9.0, rh_pu=0.35, begin_s=32_400.0, fronts_k=2.0),
}


def runs_of(draw: Draw, choice: Choice, plants: int, seconds: int) -> list[HealthyRun]:
    """The runs of a draw. A run has the same seed whatever else is chosen, and in every season and with all
    sensors: such runs compare pairwise."""
    places = sorted(
        product(draw.profiles, draw.racks + draw.large_racks, LOADS),
        key=lambda place: max(LATER.get(place[2], 0), place[1] in draw.large_racks),
    )
    return [
        HealthyRun(profile, racks, load, draw.first_seed + SEED_STEP * k + at, seconds, sensors, season)
        for k in range(plants)
        for at, (profile, racks, load) in enumerate(places)
        if load in choice.loads
        and profile.cooling in choice.cooling
        and racks in (choice.racks or draw.racks)
        for sensors, season in product(choice.sensors, choice.seasons)
    ]


def healthy_site(run: HealthyRun) -> Site:
    """The site of a run: equal racks under feeds A and B, with CDUs and loops where coolant flows."""
    return build_site(site_spec(run), "quiet")


def site_spec(run: HealthyRun, room_pu: float = ROOM_PU) -> SiteSpec:
    """Its description, with so much room in the budgets that are not scarce."""
    names = [f"r{i + 1}" for i in range(run.racks)]
    rack: dict[str, Any] = {"name": f"r[1-{run.racks}]", "profile": run.profile.name}
    hall: dict[str, Any] = {"name": "h", "racks": [rack]}
    tree: dict[str, Any] = {"site": "quiet", "halls": [hall]}
    budget_pu = SCARCE_PU if run.load == "capped" else room_pu
    hall["feeders"] = [
        {"name": f"{side.lower()}{k}", "side": side, "budget_w": budget_pu * run.profile.rack_w * len(some),
         "serves": some}
        for k, some in enumerate(_groups(names, FEED_RACKS))
        for side in ("A", "B")
    ]  # fmt: skip
    if run.profile.cooling == "air":
        rack["nodes"] = AIR_NODES
    else:
        cdus = _groups(names, CDU_RACKS)
        hall["cdus"] = [
            {"name": f"cdu{k}", "serves": some, "loop": f"fws{k * CDU_RACKS // LOOP_RACKS}"}
            for k, some in enumerate(cdus)
        ]
        loops = len(_groups(names, LOOP_RACKS))
        tree["loops"] = [{"name": f"fws{k}", "cooling": ("dry_cooler", "tower")[k % 2]} for k in range(loops)]
    return spec_of(tree, None, "quiet")


def _groups(names: list[str], size: int) -> list[list[str]]:
    return [names[i : i + size] for i in range(0, len(names), size)]
