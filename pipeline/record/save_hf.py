"""`--save-hf`: the weights of each checkpoint also where the user wants them, in Hugging Face format.

Invariants: it is made from a committed checkpoint, so it never holds weights that a resumed run would not continue
from; the target appears whole or not at all, and replaces what an earlier checkpoint left there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from models.disk import CheckpointError, explain_disk_errors

MODEL_DIR: Final = "hf"


def save_hf(checkpoint: Path, pattern: str, step: int) -> Path:
    """Copy the policy of a committed checkpoint to `pattern`, with `{step}` replaced; where it is now.

    Raises CheckpointError if the disk fails, or if something that is no such copy is in the way.
    """
    target = Path(pattern.replace("{step}", str(step))).expanduser()
    if target.exists() and not (target / "config.json").is_file():
        raise CheckpointError(
            f"--save-hf {target} exists and is no model in Hugging Face format; move it away, or choose another place"
        )
    draft, old = target.with_name(f".{target.name}.draft"), target.with_name(f".{target.name}.replaced")
    with explain_disk_errors(target, remove=draft):
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(checkpoint / MODEL_DIR, draft)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return target
