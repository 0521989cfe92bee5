"""What a run leaves behind and shows: metrics, traces, the live table, the learning curve and the summary."""
