"""Grader processes: where a grader that may hang, crash or grow is run, with a deadline for each sample."""
