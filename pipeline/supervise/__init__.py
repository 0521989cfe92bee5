"""Who restarts which process. All restarts wait longer each time, and too many within an hour end the run
(`--max-restarts`, and `--auto-resume` for the run itself).

- A stage replica that ends: `ProcessRunner` (runner.py), alone. The hubs redeliver what it held.
- An engine or the router that ends, fails its health checks, or takes no weights: `ServerSupervisor` (restarts.py),
  alone. Requests continue at other engines, or wait.
- A weight fetcher that ends or is silent: `WeightFetchers` (servers.py), alone. The engines keep their weights.
- The train stage and its ranks, if any of them ends or hangs: `TrainerUnit` (trainer_unit.py), all together. It trains
  again what no saved state has.
- The controller, if it is killed, or fails after a checkpoint: the parent process of `--auto-resume` (auto_resume.py),
  from the last checkpoint, with the engines kept.
- Workers of graders, tools and environments: the stage that owns them (stages/workers).
- Never restarted: external engines and routers, which are watched until they answer again (external_servers.py);
  replicas, ranks and engines of `--runner inprocess`; a trainer with `--colocate`; and what would only fail again: a
  user's mistake, a full disk, an exception of the train stage. The run ends then, but for external servers, and
  `--resume` continues it.
"""
