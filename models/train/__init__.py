"""Training backends behind one Protocol, `interface.TrainBackend`."""
