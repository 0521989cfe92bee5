"""Who may write which keys of a run's topic: a reward worker publishes no weights. The controller's process may all.

Keys that are not listed (figures, notices, what custom stages tell each other) are anybody's. The name of a replica is
that of its key where processes are on several hosts; on one machine it is what the process says, for all processes
there are one user's, and the table keeps mistakes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from models.train.trainer_group.rank_spec import MEETING
from pipeline.hosts.rendezvous import ADMITTED, CONFIG, FILES_PREFIX, HOST_KEY, retire_key, spec_key
from pipeline.hosts.weights_source import SOURCE
from stages.engines.colocation import KEY as DEVICE
from stages.topic_values import ADDRESS, BROUGHT, DIRECTORY, LEAVE, ORDER, SETTINGS
from stages.train.checkpoints import SAVE

_CONTROLLER: Final = frozenset[str]()
_ENGINES, _TRAIN = frozenset({"engines"}), frozenset({"train"})

TOPIC_WRITERS: Final[Mapping[str, frozenset[str]]] = {
    SOURCE: _TRAIN,
    "weights": _TRAIN,
    MEETING: frozenset({"train-rank"}),
    DIRECTORY: _ENGINES,
    ORDER: _ENGINES,
    BROUGHT: frozenset({"fetcher"}),
    "router_state": _ENGINES,
    f"{DEVICE}/": _ENGINES,
    DEVICE: _TRAIN,
    "eval/": frozenset({"evaluate"}),
    "drain": frozenset({"prompts"}),
    **dict.fromkeys(
        (ADMITTED, CONFIG, spec_key(""), retire_key(""), HOST_KEY, FILES_PREFIX, SETTINGS, SAVE), _CONTROLLER
    ),
    **dict.fromkeys((ADDRESS, LEAVE, "router", "scale/", "dead", "end"), _CONTROLLER),
}
