"""Several processes that train one policy, behind one `TrainBackend`: the gang, and the stage's end of it."""
