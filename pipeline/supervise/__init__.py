"""Which component restarts which processes.

- A stage replica, an engine, the router, a weight fetcher: alone, with backoff, within `--max-restarts` an hour
  (runner.py, restarts.py, servers.py). Hubs and ledger give its work to others.
- The trainer (trainer_unit.py): the train stage and its ranks are one unit. If any of them dies or hangs, here or with
  its node, all are ended and restarted, while engines, prompts and finished groups stay. The new unit loads the
  newest state, a checkpoint or a recovery point of stages/train/recovery.py, or the initial weights. The ledger is not
  rolled back: a step counts once it is reported, and only after its batch is on disk. So the unit trains those batches
  again, reports none, and announces the version of the ledger's last step. Thus no group is trained twice in the
  ledger, versions never fall, and no engine holds weights of a step that never happened.
- The controller: `--auto-resume` starts the run again from its last checkpoint, with the engines kept (auto_resume.py).
- Nothing is restarted that would only fail again: a user's mistake, a full disk, an exception of the train stage. With
  `--colocate` or `--runner inprocess` a lost trainer ends the run, which is then resumed.
"""
