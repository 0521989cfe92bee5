"""Several processes that train one policy, behind one `TrainBackend`: the trainer group, and the stage's end of it."""
